"""How many bytes of a checkpoint are of which role and format, by its headers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from moequant.weights.encoded import EncodedInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from moequant.models import Architecture, TensorRole
    from moequant.storage.headers import TensorInfo
    from moequant.weights.converted import ConvertedCheckpoint
    from moequant.weights.source_model import SourceModel

    Row = tuple[TensorInfo, TensorRole, str | None]


def roles_of(
    infos: Iterable[TensorInfo], architecture: Architecture, converted: ConvertedCheckpoint | None
) -> Iterator[Row]:
    """Each tensor, its role, and the format of the quantized weight it is part of, or None.

    Args:
        infos: tensors of a checkpoint.
        architecture: its architecture.
        converted: the checkpoint as `seen_as_source` gives it; None for a plain one.

    Raises:
        UnsupportedError: an unknown scheme, or an expert that matches no pattern.
    """
    for info in infos:
        part = None if converted is None else converted.part_of(info.name)
        yield info, *(part or (architecture.classify(info.name), None))


def roles_in(tensors: Mapping[str, TensorInfo], found: SourceModel) -> Iterator[Row]:
    """As `roles_of`, of a checkpoint that was read as a source."""
    parts: dict[str, tuple[TensorRole, str | None]] = {}
    for weight in found.weights.values():
        if isinstance(weight, EncodedInfo):
            role = found.model.roles[weight.name]
            parts |= {part.name: (role, weight.format) for part in weight.parts}
    architecture = found.model.architecture
    for info in found.dropped:
        parts[info.name] = architecture.classify(f"{info.name.rpartition('.')[0]}.weight"), None
    for name, info in tensors.items():
        yield info, *(parts.get(name) or (architecture.classify(name), None))


def size_by_role(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Number of tensors, dtypes and bytes by role and format, as plain data."""
    members: dict[tuple[str, str | None], list[TensorInfo]] = defaultdict(list)
    for info, role, format in rows:
        members[role.role, format].append(info)
    return [
        {
            "role": role,
            "format": format,
            "tensors": len(infos),
            "dtypes": sorted({info.dtype for info in infos}),
            "bytes": sum(info.size_bytes for info in infos),
        }
        for (role, format), infos in members.items()
    ]
