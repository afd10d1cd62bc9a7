"""What is known of a finished shard: its digest, its quantizer and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

# Not for types only: pydantic checks what it reads by them.
from moequant.conversion.gptq_errors import GptqError  # noqa: TC001
from moequant.conversion.requantization_error import RequantizationError  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable


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


@dataclass(frozen=True, kw_only=True)
class FinishedShard:
    """A complete shard on disk.

    Attributes:
        file: its name.
        bytes: its size.
        sha256: its digest.
        requantization_errors: the errors of its weights that were quantized in the source, by kind.
        gptq_errors: the errors of its weights that were rounded by GPTQ, by kind.
        not_finite: its copied tensors that hold NaN or Inf, each with the first one.
        quantizer: the quantizer that was used; None if everything was copied.
    """

    file: str
    bytes: int
    sha256: str
    requantization_errors: tuple[RequantizationError, ...] = ()
    gptq_errors: tuple[GptqError, ...] = ()
    not_finite: tuple[str, ...] = ()
    quantizer: UsedQuantizer | None = None


_SHARD = TypeAdapter(FinishedShard)


def journal_line(shard: FinishedShard) -> bytes:
    """The line of a shard in the journal."""
    return _SHARD.dump_json(shard, exclude_defaults=True) + b"\n"


def parse_line(line: bytes) -> FinishedShard | None:
    """Inverse of `journal_line`; None if incomplete, so that the shard is written again."""
    try:
        return _SHARD.validate_json(line, strict=True)
    except ValidationError:
        return None


@dataclass(frozen=True, kw_only=True)
class Share:
    """The shards of a conversion that one quantizer made; name and reason as `UsedQuantizer`.

    Attributes:
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


def shares(shards: Iterable[FinishedShard]) -> list[Share]:
    """The shards by quantizer; those of copies only have none."""
    made: dict[tuple[str, str | None], list[tuple[str, str | None]]] = {}
    for shard in shards:
        if (used := shard.quantizer) is not None:
            made.setdefault((used.name, used.reason), []).append((shard.file, used.host))
    return [
        Share(
            name=name,
            reason=reason,
            shards=tuple(file for file, _ in of_one),
            hosts=tuple(sorted({host for _, host in of_one if host is not None})),
        )
        for (name, reason), of_one in made.items()
    ]
