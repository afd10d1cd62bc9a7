"""How many bytes of a checkpoint are of which role and format, by its headers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from moequant.dialects.names import ACTIVATION_SCALES
from moequant.weights.encoded import EncodedInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from moequant.models import Architecture, TensorRole
    from moequant.storage.headers import TensorInfo
    from moequant.weights.converted import ConvertedCheckpoint
    from moequant.weights.source_model import SourceModel

    Part = tuple[TensorRole, str | None]
    Row = tuple[TensorInfo, TensorRole, str | None]


def roles_of(
    infos: Iterable[TensorInfo], architecture: Architecture, converted: ConvertedCheckpoint | None
) -> Iterator[Row]:
    """Each tensor, its role, and the format of the quantized weight it is part of, or None.

    Calibrated scales of activations count as parts of the weight that multiplies these.

    Args:
        infos: tensors of a checkpoint.
        architecture: its architecture.
        converted: the checkpoint as `seen_as_source` gives it; None for a plain one.

    Raises:
        UnsupportedError: an unknown scheme, or an expert that matches no pattern.
    """
    for info in infos:
        if converted is None:
            yield info, architecture.classify(info.name), None
        elif _is_scale(info.name):
            leaf = info.name.rpartition(".")[2]
            module = converted.dialect.module_of_scale(info.name)
            yield info, *_of_scale(module, architecture, converted.part_of(f"{module}.{leaf}"))
        else:
            part = converted.part_of(info.name)
            yield info, *(part or (architecture.classify(info.name), None))


def roles_in(tensors: Mapping[str, TensorInfo], found: SourceModel) -> Iterator[Row]:
    """As `roles_of`, of a checkpoint that was read as a source."""
    parts: dict[str, Part] = {}
    modules: dict[str, Part] = {}
    for weight in found.weights.values():
        if isinstance(weight, EncodedInfo):
            modules[weight.module] = found.model.roles[weight.name], weight.format
            parts |= dict.fromkeys((part.name for part in weight.parts), modules[weight.module])
    architecture, dialect = found.model.architecture, found.dialect
    for name, info in tensors.items():
        if dialect is not None and _is_scale(name):
            module = dialect.module_of_scale(name)
            yield info, *_of_scale(module, architecture, modules.get(module))
        else:
            yield info, *(parts.get(name) or (architecture.classify(name), None))


def _is_scale(name: str) -> bool:
    """Whether a tensor is a calibrated scale of activations."""
    return name.rpartition(".")[2] in ACTIVATION_SCALES


def _of_scale(module: str, architecture: Architecture, part: Part | None) -> Part:
    """Role and format under which a scale counts: those of the weight whose activations it scales.

    Args:
        module: the weight's module.
        architecture: the checkpoint's.
        part: role and format of the weight; None if it is not quantized.
    """
    return part or (architecture.classify(f"{module}.weight"), None)


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
