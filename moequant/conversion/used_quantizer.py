"""Which quantizer made a shard, as journal, moequant.json and report say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class UsedQuantizer:
    """What quantized the weights of a shard, or dequantized them.

    Attributes:
        name: of the quantizer.
        reason: why it was not the fastest; None if it was.
        host: the machine of a cluster; None for the one that began the conversion.
    """

    name: str
    reason: str | None = None
    host: str | None = None

    @classmethod
    def from_json(cls, entry: object) -> UsedQuantizer | None:
        """What `asdict` made; None for what it never makes."""
        if not isinstance(entry, dict) or entry.keys() != {"name", "reason", "host"}:
            return None
        if not isinstance(entry["name"], str):
            return None
        if not all(isinstance(entry[key], str | None) for key in ("reason", "host")):
            return None
        return cls(**entry)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one quantizer, for one reason, did of a conversion.

    Attributes:
        name: of the quantizer.
        reason: why it was not the fastest; None if it was.
        shards: names of the files it made, in order.
        hosts: machines of a cluster on which it did, sorted; none for the one that began it.
    """

    name: str
    reason: str | None
    shards: tuple[str, ...]
    hosts: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """As moequant.json has it, which speaks of no machine."""
        return {"name": self.name, "reason": self.reason, "shards": list(self.shards)}


def shares(quantizers: Mapping[str, UsedQuantizer | None]) -> list[Share]:
    """Which quantizer made which shards.

    Args:
        quantizers: by name of the shard, in order; None for a shard that was only copied.
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
