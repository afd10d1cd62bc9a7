"""Which quantizer was used for a shard, for journal, moequant.json and report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class UsedQuantizer:
    """The quantizer that quantized or dequantized the weights of a shard.

    Attributes:
        name: name of the quantizer.
        reason: why it is not the fastest one; None if it is.
        host: the machine of a cluster; None for the one that started the conversion.
    """

    name: str
    reason: str | None = None
    host: str | None = None

    @classmethod
    def from_json(cls, entry: object) -> UsedQuantizer | None:
        """Inverse of `asdict`; None for invalid input."""
        if not isinstance(entry, dict) or entry.keys() != {"name", "reason", "host"}:
            return None
        if not isinstance(entry["name"], str):
            return None
        if not all(isinstance(entry[key], str | None) for key in ("reason", "host")):
            return None
        return cls(**entry)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The shards of a conversion that one quantizer made.

    Attributes:
        name: name of the quantizer.
        reason: why it is not the fastest one; None if it is.
        shards: names of the files, in order.
        hosts: machines of a cluster, sorted; empty for the one that started the conversion.
    """

    name: str
    reason: str | None
    shards: tuple[str, ...]
    hosts: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """The entry of moequant.json, which does not name machines."""
        return {"name": self.name, "reason": self.reason, "shards": list(self.shards)}


def shares(quantizers: Mapping[str, UsedQuantizer | None]) -> list[Share]:
    """The shards by quantizer.

    Args:
        quantizers: quantizer by name of the shard, in order; None for a shard of copies only.
    """
    files: dict[tuple[str, str | None], list[str]] = {}
    hosts: dict[tuple[str, str | None], set[str]] = {}
    for file, used in quantizers.items():
        if used is None:
            continue
        kind = used.name, used.reason
        files.setdefault(kind, []).append(file)
        hosts.setdefault(kind, set())
        if used.host is not None:
            hosts[kind].add(used.host)
    return [
        Share(
            name=name, reason=reason, shards=tuple(made), hosts=tuple(sorted(hosts[name, reason]))
        )
        for (name, reason), made in files.items()
    ]
