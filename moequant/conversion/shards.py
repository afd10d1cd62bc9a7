"""The output files: which tensors each has, in what order and at which positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from moequant.conversion.units import Copy
from moequant.dialects.names import is_expert
from moequant.errors import CheckpointError
from moequant.storage.headers import TensorInfo, bit_count, dtype_name
from moequant.storage.writer import lay_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moequant.conversion.stack import Stack
    from moequant.conversion.units import Item, Unit
    from moequant.dialects.base import Dialect

    _Tensor = tuple[str, str, tuple[int, ...]]
    """Name, or its last part, safetensors dtype and shape of a tensor to be written."""

# Modules that stand for all others, because a dialect may store experts otherwise.
_AN_EXPERT, _ANOTHER = "layers.0.experts.0.down_proj", "layers.0.down_proj"


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """One output file, with everything known except the data.

    Attributes:
        file: its final name.
        items: its items, in the order of the file.
        header: the bytes before the data.
        slots: the position of each tensor.
        pieces: the position of each item's tensors; those of a stack are parts of a slot.
        order: numbers of the items in the order of work; empty if that is the file's.
    """

    file: str
    items: tuple[Item, ...]
    header: bytes
    slots: Mapping[str, TensorInfo]
    pieces: Mapping[str, TensorInfo]
    order: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Size of the finished file."""
        return len(self.header) + sum(slot.size_bytes for slot in self.slots.values())

    @property
    def work_bytes(self) -> int:
        """Source bytes of its items."""
        return sum(item.source_bytes for item in self.items)


def plan_shards(
    items: Iterable[Item], dialect: Dialect, max_shard_bytes: int
) -> tuple[PlannedShard, ...]:
    """Fill shards in order; the tensors of a unit or a stack stay in one shard."""
    groups: list[tuple[list[Item], list[_Tensor]]] = []
    room = 0
    writers: dict[str, str] = {}
    destinations: dict[str, list[Item]] = {}
    for item in items:
        destinations.setdefault(_destination(item), []).append(item)
    for together in destinations.values():
        outputs = _outputs(together, dialect)
        size = 0
        for name, dtype, shape in outputs:
            _claim(name, together[0].name, writers)
            size += bit_count(dtype, shape) // 8
        if not groups or size > room:
            groups.append(([], []))
            room = max_shard_bytes
        groups[-1][0].extend(together)
        groups[-1][1].extend(outputs)
        room -= size
    return tuple(
        _shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", *group, dialect)
        for i, group in enumerate(groups, start=1)
    )


def _outputs(items: Sequence[Item], dialect: Dialect) -> list[_Tensor]:
    """The tensors of one item, or the stack's tensors for the units of a stack."""
    first = items[0]
    if isinstance(first, Copy):
        return [(first.info.name, first.info.dtype, first.info.shape)]
    assert len(items) == (1 if first.stack is None else first.stack.experts), first.name
    return unit_outputs(first, dialect)


def unit_outputs(unit: Unit, dialect: Dialect) -> list[_Tensor]:
    """The tensors of a unit, or of the stack that it is a part of."""
    if unit.stack is None:
        return [
            (f"{weight.module}.{suffix}", dtype, shape)
            for weight in unit.weights
            for suffix, dtype, shape in _stored(
                dialect,
                unit.format,
                weight.info.shape,
                expert=is_expert(weight.module),
                static=unit.is_static,
            )
        ]
    shapes = [weight.info.shape for weight in unit.weights]
    parts = [_stored(dialect, unit.format, shape, expert=True, static=False) for shape in shapes]
    return [
        (
            unit.stack.name(suffix),
            dtype,
            unit.stack.shape(unit.stack.joined_shape([own[i][2] for own in parts])),
        )
        for i, (suffix, dtype, _) in enumerate(parts[0])
    ]


@lru_cache(maxsize=1 << 10)
def _stored(
    dialect: Dialect,
    format: str,
    shape: tuple[int, ...],
    *,
    expert: bool,
    static: bool,
) -> tuple[_Tensor, ...]:
    """Last name component, safetensors dtype and shape of the tensors of a converted weight."""
    module = _AN_EXPERT if expert else _ANOTHER
    specs = dialect.encoding(format).specs(module, shape)
    if static:
        specs |= dialect.input_scale_specs(module, format)
    return tuple(
        (name.removeprefix(f"{module}."), dtype_name(spec.dtype), spec.shape)
        for name, spec in specs.items()
    )


def _destination(item: Item) -> str:
    """The stack of an item, or the item's own name."""
    if isinstance(item, Copy) or item.stack is None:
        return item.name
    return item.stack.tensor


def _claim(name: str, source: str, writers: dict[str, str]) -> None:
    """Check that no two items would write the same name."""
    other = writers.setdefault(name, source)
    if other != source:
        raise CheckpointError(
            f"{source}: would be written as {name}, and so would {other}; the source has both "
            "plain and quantized tensors of a weight. Remove one kind, or fetch the plain release"
        )


def _shard(
    file: str, items: Sequence[Item], outputs: Sequence[_Tensor], dialect: Dialect
) -> PlannedShard:
    header, slots = lay_out(outputs)
    pieces = dict(slots)
    for item in items:
        if not isinstance(item, Copy) and item.stack is not None:
            for suffix in dialect.encoding(item.format).suffixes:
                name = item.stack.name(suffix)
                pieces.pop(name, None)
                pieces[item.stack.piece(suffix)] = _piece(item.stack, suffix, slots[name])
    return PlannedShard(file=file, items=tuple(items), header=header, slots=slots, pieces=pieces)


def _piece(stack: Stack, suffix: str, whole: TensorInfo) -> TensorInfo:
    """The part of a stack's slot for one expert."""
    size_bytes = whole.size_bytes // stack.experts
    start = whole.start + stack.expert * size_bytes
    return whole._replace(
        name=stack.piece(suffix),
        shape=stack.shape_of_one(whole.shape),
        start=start,
        stop=start + size_bytes,
    )
