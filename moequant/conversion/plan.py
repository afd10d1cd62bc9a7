"""The plan of a conversion: a pure function of headers, config and recipe.

No tensor is read. Sizes, shard names, every output header, the index and all refusals are known
before work begins, and the same inputs give the same plan anywhere: it is what several workers,
a restart and `moequant verify` agree on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moequant._version import __version__
from moequant.checkpoint.headers import DTYPE_BITS, DTYPES, TensorInfo, bit_count, dtype_name
from moequant.checkpoint.parts import PartInfo, unstacked
from moequant.checkpoint.writer import TensorSlot, lay_out
from moequant.conversion.assign import assign
from moequant.conversion.recipe import parse_size
from moequant.conversion.units import Copy, Stack, Unit
from moequant.dialects import REGISTRY as DIALECTS
from moequant.dialects import get_dialect
from moequant.errors import CheckpointError, RecipeError, UnsupportedError
from moequant.formats import REGISTRY as FORMATS
from moequant.models import ROUTED_EXPERTS, read_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from moequant.checkpoint.parts import WeightInfo
    from moequant.conversion.recipe import Recipe
    from moequant.conversion.units import Weight
    from moequant.dialects.base import Dialect
    from moequant.models import Architecture, Model
    from moequant.quantizers import Job

# What a quantized checkpoint holds and a plain one does not, in any known dialect.
_QUANTIZED_DTYPES = {name for name, bits in DTYPE_BITS.items() if bits <= 8} - {"BOOL"}
_QUANTIZED_NAMES = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
    "weight_zero_point", "input_scale", "input_global_scale", "qweight", "qzeros", "_blocks",
    "_scales", ".scales",
)  # fmt: skip

_Output = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype and shape of a tensor to be written."""


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """One output file, known to the last byte but for the data.

    Attributes:
        file: its final name.
        items: what goes in, in the order it is worked on.
        header: the bytes before the data.
        slots: where each tensor lies behind the header.
        pieces: where each tensor that an item makes goes; those of a stack are parts of a slot.
    """

    file: str
    items: tuple[Unit | Copy, ...]
    header: bytes
    slots: Mapping[str, TensorSlot]
    pieces: Mapping[str, TensorSlot]

    @property
    def size_bytes(self) -> int:
        """Size of the finished file."""
        return len(self.header) + sum(slot.size_bytes for slot in self.slots.values())

    @property
    def work_bytes(self) -> int:
        """Bytes of the source that go into it."""
        return sum(item.source_bytes for item in self.items)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a conversion will do.

    Attributes:
        model: what the source is.
        recipe: what was asked for, complete.
        dialect: whose names and config the output has.
        items: what is converted and what is copied, in order.
        shards: the output files; none if there are refusals.
        quantization_config: the new entry of config.json.
        source_files: size and header digest of every weight file read.
        warnings: what the user should know before going on; one sentence each.
        refusals: why this cannot be converted; with any, nothing is written.
        digest: SHA-256 over all that decides the output's bytes.
    """

    model: Model
    recipe: Recipe
    dialect: Dialect
    items: tuple[Unit | Copy, ...]
    shards: tuple[PlannedShard, ...]
    quantization_config: Mapping[str, Any]
    source_files: Mapping[str, Mapping[str, Any]]
    warnings: tuple[str, ...]
    refusals: tuple[str, ...]
    digest: str

    @property
    def units(self) -> tuple[Unit, ...]:
        """What is converted, in order."""
        return tuple(item for item in self.items if isinstance(item, Unit))

    @property
    def copies(self) -> tuple[Copy, ...]:
        """What is copied, in order."""
        return tuple(item for item in self.items if isinstance(item, Copy))

    def jobs(self) -> list[Job]:
        """What a quantizer will be asked for, each once; of a plan without refusals."""
        kinds = {
            (unit.format, tuple(sorted(unit.options.items())), weight.info.dtype)
            for unit in self.units
            for weight in unit.weights
        }
        return [
            (FORMATS[name], dict(options), DTYPES[dtype]) for name, options, dtype in sorted(kinds)
        ]

    @property
    def source_bytes(self) -> int:
        """Bytes of all source tensors."""
        return sum(item.source_bytes for item in self.items)

    @property
    def output_bytes(self) -> int:
        """Bytes of all output files."""
        return sum(shard.size_bytes for shard in self.shards)

    def index(self) -> dict[str, Any]:
        """The content of model.safetensors.index.json."""
        weight_map = {name: shard.file for shard in self.shards for name in shard.slots}
        total = sum(slot.size_bytes for shard in self.shards for slot in shard.slots.values())
        return {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }

    def peak_bytes(self, workers: int) -> int:
        """Memory `workers` may hold at once, beyond the interpreter and torch; 0 if refused."""
        if self.refusals:
            return 0
        unit = max((unit.working_bytes for unit in self.units), default=0)
        return workers * max(unit, 2 * COPY_CHUNK_BYTES)

    def device_bytes(self, workers: int) -> int:
        """Memory `workers` may hold on GPUs at once, if these quantize; 0 if refused."""
        if self.refusals:
            return 0
        return workers * max((unit.device_bytes for unit in self.units), default=0)


COPY_CHUNK_BYTES = 8 << 20
"""Copied tensors stream through buffers of this size."""


def make_plan(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    file_bytes: Mapping[str, int],
    recipe: Recipe,
    own: Sequence[Architecture] = (),
) -> Plan:
    """Plan a conversion.

    Args:
        tensors: every tensor of the source, in natural order.
        config: the source's config.json.
        file_bytes: size of every weight file of the source.
        recipe: what to convert into what, and how to write it.
        own: architectures that a user's file or a record describes.

    Raises:
        CheckpointError: the source is incomplete or contradicts its config.
        UnsupportedError: an unknown architecture, an expert no rule explains, or no such dialect.
        RecipeError: the recipe is for other architectures, splits what must stay together, or
            matches nothing.
    """
    _check_plain(tensors, config)
    model = read_model(config, tensors, own)
    _check_architecture(recipe, model.architecture, config)
    weights = unstacked(tensors, model)
    units, warnings = assign(
        weights, model.roles, recipe, model.moe.layers, model.architecture.fused
    )
    formats = list(dict.fromkeys(unit.format for unit in units))
    dialect = _choose_dialect(recipe.output.dialect, formats, model.architecture)
    if dialect.stacks:
        units = [replace(unit, stack=_stack(unit, model)) for unit in units]
    converted = {weight.module: unit.format for unit in units for weight in unit.weights}
    modules = (_module(name, info) for name, info in weights.items())
    kept = [module for module in modules if module is not None and module not in converted]
    items = tuple(_items(tensors, weights, units))
    refusals = tuple(_refusals(units, dialect))
    shards: tuple[PlannedShard, ...] = ()
    quantization_config: dict[str, Any] = {}
    if not refusals:
        shards = _shards(items, dialect, parse_size(recipe.output.max_shard_size))
        quantization_config = dialect.quantization_config(converted, kept)
    source_files = _describe_files(tensors, file_bytes)
    if config.get("quantization_config"):
        warnings.append(
            "the source's config.json has a quantization_config although its weights are plain; "
            "ours takes its place"
        )
    shapes = {weight.module: weight.info.shape for unit in units for weight in unit.weights}
    warnings += dialect.warnings(converted, shapes, kept)
    return Plan(
        model=model,
        recipe=recipe,
        dialect=dialect,
        items=items,
        shards=shards,
        quantization_config=quantization_config,
        source_files=source_files,
        warnings=tuple(warnings),
        refusals=refusals,
        digest=_digest(
            model.architecture, units, dialect, shards, quantization_config, source_files
        ),
    )


def _check_plain(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    """Refuse a source that holds quantized tensors: copied, they would lose their config."""
    for name, info in tensors.items():
        if info.dtype in _QUANTIZED_DTYPES or name.endswith(_QUANTIZED_NAMES):
            raise UnsupportedError(
                f"{name}: stored as {info.dtype}, so this checkpoint is quantized already; "
                "conversion starts from BF16, F16 or F32: take the unquantized release of this "
                f"model{_readable_as_it_is(config)}"
            )


def _readable_as_it_is(config: Mapping[str, Any]) -> str:
    quantization_config = config.get("quantization_config")
    if not isinstance(quantization_config, dict):
        return ""
    claiming = next((d for d in DIALECTS.values() if d.claims(quantization_config)), None)
    if claiming is None:
        return ""
    return (
        f". What moequant's runtime loads needs no conversion: this is the dialect {claiming.name}"
    )


def _check_architecture(
    recipe: Recipe, architecture: Architecture, config: Mapping[str, Any]
) -> None:
    classes = config.get("architectures")
    listed = classes if isinstance(classes, list) else []
    names = {architecture.name, *(name for name in listed if isinstance(name, str))}
    if recipe.architectures and not names & set(recipe.architectures):
        raise RecipeError(
            f"the recipe is for {', '.join(recipe.architectures)}, but this checkpoint is "
            f"{', '.join(sorted(names))}"
        )


def _choose_dialect(
    name: str | None, formats: Sequence[str], architecture: Architecture
) -> Dialect:
    """The dialect called `name`, or the first that serves architecture and formats."""
    serving = {d.name: d for d in DIALECTS.values() if _serves(d, architecture)}
    if name is not None:
        dialect = get_dialect(name)
        if name not in serving:
            choice = "; or ".join(
                f"{d.name}, which carries {', '.join(d.suffixes)} ({d.summary})"
                for d in serving.values()
            )
            raise UnsupportedError(
                f"the dialect {name} is not for {architecture.name}: none of its consumers loads "
                f"the experts of a {architecture.name} checkpoint written in it. Choose {choice}"
            )
        return dialect
    for dialect in serving.values():
        if all(format in dialect.suffixes for format in formats):
            return dialect
    raise UnsupportedError(f"no dialect carries all of {', '.join(formats)} in one checkpoint")


def _serves(dialect: Dialect, architecture: Architecture) -> bool:
    if architecture.dialects is None:
        return not dialect.stacks
    return dialect.name in architecture.dialects


def _stack(unit: Unit, model: Model) -> Stack | None:
    """Where a unit goes in a dialect that stacks experts; None for what is no expert."""
    role, stacked = model.roles[unit.name], model.architecture.stacked
    if role.role != ROUTED_EXPERTS:
        return None
    assert stacked is not None, "the table gives such a dialect only to those that stack"
    assert role.layer is not None, unit.name
    assert role.expert is not None, unit.name
    assert role.projection is not None, unit.name
    return Stack(
        tensor=stacked.tensor(role.layer, role.projection),
        expert=role.expert,
        experts=model.moe.experts,
        interleaved=stacked.interleaved,
    )


def _module(name: str, info: WeightInfo) -> str | None:
    """The module a two-dimensional weight belongs to, as engines name it."""
    if len(info.shape) == 2 and name.endswith(".weight"):
        return name.removesuffix(".weight")
    return None


def _refusals(units: Iterable[Unit], dialect: Dialect) -> Iterator[str]:
    """One line for each reason, with the first weight it concerns and how many there are."""
    first: dict[tuple[str, ...], str] = {}
    count: Counter[tuple[str, ...]] = Counter()
    for unit in units:
        for weight in unit.weights:
            if (reason := _refusal(unit, weight, dialect)) is None:
                continue
            # Weights of one kind are refused for one reason, in messages that differ by name.
            kind: tuple[str, ...]
            kind = (unit.format, weight.role, str(weight.info.shape), weight.info.dtype)
            first.setdefault(kind, reason)
            count[kind] += 1
    for kind, reason in first.items():
        others = count[kind] - 1
        yield reason + (f". So it is with {others} more weights of this shape" if others else "")


def _refusal(unit: Unit, weight: Weight, dialect: Dialect) -> str | None:
    try:
        weight.check_dtype()
        dialect.check(weight.module, unit.format, weight.info.shape)
    except UnsupportedError as error:
        return f"{error}{_others(unit.format, weight)}"
    return None


def _others(format: str, weight: Weight) -> str:
    """Which formats could hold a weight that `format` cannot for its shape."""
    if not _holds(format, weight):
        others = [name for name in FORMATS if _holds(name, weight)]
        if others:
            return f", or choose a format that holds this shape: {', '.join(others)}"
    return ""


def _holds(format: str, weight: Weight) -> bool:
    try:
        FORMATS[format].check_shape(weight.info.shape)
    except UnsupportedError:
        return False
    return True


def _items(
    tensors: Mapping[str, TensorInfo], weights: Mapping[str, WeightInfo], units: Sequence[Unit]
) -> Iterator[Unit | Copy]:
    """Units where their first weight stands, and everything else, in natural order.

    A tensor that stacks experts stands for those of its weights that no unit takes.
    """
    unit_of = {weight.info.name: unit for unit in units for weight in unit.weights}
    copied: set[str] = set()
    for name, info in weights.items():
        unit = unit_of.get(name)
        if unit is None:
            stored = tensors[info.place.tensor] if isinstance(info, PartInfo) else info
            if stored.name not in copied:
                copied.add(stored.name)
                yield Copy(info=stored)
        elif unit.weights[0].info.name == name:
            yield unit


def _outputs(items: Sequence[Unit | Copy], dialect: Dialect) -> list[_Output]:
    """The tensors that items make: one item its own, or the units of a stack the stack's."""
    first = items[0]
    if isinstance(first, Copy):
        return [(first.info.name, first.info.dtype, first.info.shape)]
    specs = [
        dialect.specs(weight.module, first.format, weight.info.shape) for weight in first.weights
    ]
    if first.stack is None:
        return [(n, dtype_name(s.dtype), s.shape) for of in specs for n, s in of.items()]
    assert len(items) == first.stack.experts, first.name
    rows = sum(weight.info.shape[0] for weight in first.weights)
    return [
        (first.stack.name(suffix), dtype_name(s.dtype), (first.stack.experts, rows, *s.shape[1:]))
        for suffix, s in zip(dialect.suffixes[first.format], specs[0].values(), strict=True)
    ]


def _shards(
    items: Iterable[Unit | Copy], dialect: Dialect, max_shard_bytes: int
) -> tuple[PlannedShard, ...]:
    """Fill shards in order; what belongs to one unit or one stack stays in one shard."""
    groups: list[tuple[list[Unit | Copy], list[_Output]]] = []
    room = 0
    writers: dict[str, str] = {}
    destinations: dict[str, list[Unit | Copy]] = {}
    for item in items:
        destinations.setdefault(_destination(item), []).append(item)
    for together in destinations.values():
        outputs = _outputs(together, dialect)
        for name, _, _ in outputs:
            _claim(name, together[0].name, writers)
        size = sum(bit_count(dtype, shape) // 8 for _, dtype, shape in outputs)
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


def _destination(item: Unit | Copy) -> str:
    """The stack a unit goes into, else the item itself."""
    return item.stack.tensor if isinstance(item, Unit) and item.stack is not None else item.name


def _claim(name: str, source: str, writers: dict[str, str]) -> None:
    """Refuse a source that already holds a name we would write."""
    other = writers.setdefault(name, source)
    if other != source:
        raise CheckpointError(
            f"{source}: would be written as {name}, and so would {other}; the source holds a "
            "quantization's tensors beside the weights. Remove them, or fetch the plain release"
        )


def _shard(
    file: str, items: Sequence[Unit | Copy], outputs: Sequence[_Output], dialect: Dialect
) -> PlannedShard:
    header, slots = lay_out(outputs)
    pieces = dict(slots)
    for item in items:
        if isinstance(item, Unit) and item.stack is not None:
            for suffix in dialect.suffixes[item.format]:
                name = item.stack.name(suffix)
                pieces.pop(name, None)
                pieces[item.stack.piece(suffix)] = _piece(item.stack, suffix, slots[name])
    return PlannedShard(file=file, items=tuple(items), header=header, slots=slots, pieces=pieces)


def _piece(stack: Stack, suffix: str, whole: TensorSlot) -> TensorSlot:
    """The part of a stack's slot that one expert fills."""
    piece = replace(whole, name=stack.piece(suffix), shape=whole.shape[1:])
    return replace(piece, offset=whole.offset + stack.expert * piece.size_bytes)


def _describe_files(
    tensors: Mapping[str, TensorInfo], file_bytes: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    rows: dict[str, list[tuple[Any, ...]]] = {file: [] for file in sorted(file_bytes)}
    for info in sorted(tensors.values(), key=lambda info: info.start):
        rows[info.file].append((info.name, info.dtype, info.shape, info.start, info.stop))
    return {
        file: {"bytes": file_bytes[file], "header_sha256": _sha256_of_json(entries)}
        for file, entries in rows.items()
    }


def _digest(
    architecture: Architecture,
    units: Iterable[Unit],
    dialect: Dialect,
    shards: Iterable[PlannedShard],
    quantization_config: Mapping[str, Any],
    source_files: Mapping[str, Any],
) -> str:
    own = architecture.definition
    return _sha256_of_json(
        {
            **({} if own is None else {"architecture": own}),
            "moequant": __version__,
            "units": [[[w.info.name for w in u.weights], u.format, dict(u.options)] for u in units],
            "dialect": dialect.name,
            "quantization_config": quantization_config,
            "source_files": source_files,
            "shards": {s.file: hashlib.sha256(s.header).hexdigest() for s in shards},
        }
    )


def _sha256_of_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
