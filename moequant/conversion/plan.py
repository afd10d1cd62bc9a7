"""The plan of a conversion: a pure function of headers, config and recipe.

No tensor is read. Sizes, shard names, every output header, the index and all refusals are known
before work begins, and the same inputs give the same plan anywhere: it is what several workers,
a restart and `moequant verify` agree on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from moequant._version import __version__
from moequant.conversion.assign import assign, biases_of
from moequant.conversion.batches import BATCH_BYTES
from moequant.conversion.kept import staying
from moequant.conversion.recipe import parse_size
from moequant.conversion.stacks import dequantizing_units, stack_of
from moequant.conversion.units import Copy, Stack, Unit, quantizer_jobs
from moequant.dialects import REGISTRY as DIALECTS
from moequant.dialects import get_dialect
from moequant.dialects.engines import Verdict, Written, judge, warnings_of
from moequant.errors import CheckpointError, RecipeError, UnsupportedError
from moequant.formats import CONVERTIBLE, get_format
from moequant.models import ROUTED_EXPERTS
from moequant.storage.headers import TensorInfo, TensorSlot, bit_count, dtype_name
from moequant.storage.writer import lay_out
from moequant.weights.encoded import EncodedInfo
from moequant.weights.parts import PartInfo
from moequant.weights.source_model import read_source, source_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from moequant.conversion.assign import Assignment
    from moequant.conversion.recipe import Recipe
    from moequant.conversion.units import Item, Weight
    from moequant.dialects.base import Dialect
    from moequant.models import Architecture, Model, TensorRole
    from moequant.quantizers import Job
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.parts import WeightInfo
    from moequant.weights.source_model import SourceModel

    _Output = tuple[str, str, tuple[int, ...]]
    """Name, or its last part, safetensors dtype and shape of a tensor to be written."""


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
    items: tuple[Item, ...]
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
        items: what is quantized, what is dequantized and what is copied, in order.
        shards: the output files; none if there are refusals.
        quantization_config: the new entry of config.json; empty for none.
        source: what is known of the source's weights.
        source_files: size and header digest of every weight file read.
        engines: which of those known load the output, and what goes wrong; none where nothing of
            it is quantized.
        warnings: what the user should know before going on; one sentence each.
        refusals: why this cannot be converted; with any, nothing is written.
        digest: SHA-256 over all that decides the output's bytes.
    """

    model: Model
    recipe: Recipe
    dialect: Dialect
    items: tuple[Item, ...]
    shards: tuple[PlannedShard, ...]
    quantization_config: Mapping[str, Any]
    source: SourceModel
    source_files: Mapping[str, Mapping[str, Any]]
    engines: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    refusals: tuple[str, ...]
    digest: str

    @property
    def units(self) -> tuple[Unit, ...]:
        """What is quantized, in order."""
        return tuple(unit for unit in self._works if not unit.is_plain)

    @property
    def dequantized(self) -> tuple[Unit, ...]:
        """What is dequantized, in order."""
        return tuple(unit for unit in self._works if unit.is_plain)

    @property
    def copies(self) -> tuple[Copy, ...]:
        """What is copied, in order."""
        return tuple(item for item in self.items if isinstance(item, Copy))

    def jobs(self) -> list[Job]:
        """What a quantizer will be asked for, each once; of a plan without refusals."""
        return quantizer_jobs(self.items)

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
        unit = max((work.working_bytes for work in self._works), default=0)
        worker = max(unit + self.batch_bytes, COPY_CHUNK_BYTES)
        working = workers * worker + self.buffer_bytes(workers)
        return working + self.own_bytes

    @property
    def own_bytes(self) -> int:
        """Memory that the plan takes, with the headers read for it and the index made of it."""
        weights = self.source.weights.values()
        read = sum(len(w.parts) if isinstance(w, EncodedInfo) else 1 for w in weights)
        return _TENSOR_BYTES * (read + sum(len(shard.pieces) for shard in self.shards))

    def buffer_bytes(self, workers: int) -> int:
        """Memory that may wait to be digested and written while workers are at what follows."""
        return workers * (self.batch_bytes + WRITE_BUFFER_BYTES)

    @cached_property
    def result_bytes(self) -> int:
        """What the weights of a unit take at most."""
        return max((work.result_bytes for work in self._works), default=0)

    @cached_property
    def batch_bytes(self) -> int:
        """What results that are written together take at most: one, or those of small units."""
        return max(self.result_bytes, BATCH_BYTES if self.units else 0)

    @cached_property
    def read_bytes(self) -> int:
        """What is read at once at most, copies left out."""
        return max((work.source_bytes for work in self._works), default=0)

    @property
    def _works(self) -> tuple[Unit, ...]:
        return tuple(item for item in self.items if isinstance(item, Unit))


_PLAIN_DIALECT = "plain"
_BESIDE_QUANTIZED = "bf16"
"""What quantized weights become that no rule speaks of and that cannot stay as they are."""
_TENSOR_BYTES = 1200
"""For each tensor read or written. Measured of 45,000 to 90,000 read, those of DeepSeek-V3 in BF16
and in FP8, and as many to 134,000 written: 930 to 1090; a tenth more for other names."""
WRITE_BUFFER_BYTES = 8 << 20
"""For each worker, beside one batch: what a digest or a disk may be behind."""
COPY_CHUNK_BYTES = 8 << 20
"""Copied tensors stream through buffers of this size."""


def plan_checkpoint(
    checkpoint: Checkpoint, recipe: Recipe, own: Sequence[Architecture] = ()
) -> Plan:
    """The plan for an opened checkpoint; see `make_plan`."""
    config = source_config(checkpoint)
    return make_plan(checkpoint.tensors, config, checkpoint.file_bytes, recipe, own)


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
    source = read_source(tensors, config, own)
    model, weights = source.model, source.weights
    _check_architecture(recipe, model.architecture, config)
    assigned = assign(weights, model.roles, recipe, model.moe.layers, model.architecture.fused)
    units, warnings = assigned.units, assigned.warnings
    dialect = _dialect(recipe, source, assigned)
    if dialect.stacks:
        units = [replace(unit, stack=stack_of(unit.name, model)) for unit in units]
    converted = {weight.module: unit.format for unit in units for weight in unit.weights}
    left = _left(source, assigned)
    stay = staying(left, source, dialect)
    formats = converted | {info.module: info.format for info in stay.values()}
    modules = (_module(name, info) for name, info in weights.items())
    kept = [module for module in modules if module is not None and module not in formats]
    plain = dialect.name == _PLAIN_DIALECT
    items = tuple(_items(tensors, source, units, assigned, stay, stacked=plain))
    refusals = tuple(_refusals(units, dialect, model.architecture.fused))
    shards: tuple[PlannedShard, ...] = ()
    quantization_config: dict[str, Any] = {}
    if not refusals:
        shards = _shards(items, dialect, parse_size(recipe.output.max_shard_size))
        quantization_config = dialect.quantization_config(formats, kept)
    source_files = _describe_files(tensors, file_bytes)
    back = [info for name, info in left.items() if name not in stay]
    warnings += _warnings_of_source(source, back, config)
    if plain:
        warnings += _warnings_of_experts_apart(items, model)
    engines = _engines(formats, source, dialect, config)
    warnings += warnings_of(engines)
    return Plan(
        model=model,
        recipe=recipe,
        dialect=dialect,
        items=items,
        shards=shards,
        quantization_config=quantization_config,
        source=source,
        source_files=source_files,
        engines=engines,
        warnings=tuple(warnings),
        refusals=refusals,
        digest=_digest(units, dialect, shards, quantization_config, source, source_files),
    )


def _engines(
    formats: Mapping[str, str], source: SourceModel, dialect: Dialect, config: Mapping[str, Any]
) -> tuple[Verdict, ...]:
    """What engines do with the output: `formats` by module of all that is quantized in it."""
    if not formats:
        return ()
    roles, layers = source.model.roles, source.model.moe.sparse_layers
    architecture = source.model.architecture
    experts = {
        name.removesuffix(".weight"): info
        for name, info in source.weights.items()
        if roles[name].role == ROUTED_EXPERTS and roles[name].layer in layers
    }
    model_type = str(config.get("model_type"))
    written = Written(
        dialect=dialect.name,
        model_type=model_type,
        not_loaded=architecture.tested.get("not_loaded", {}).get(model_type),
        formats=frozenset(f for module, f in formats.items() if module not in experts),
        experts=tuple(dict.fromkeys(formats[m] for m in experts if m in formats)),
        shapes=frozenset(tuple(info.shape) for m, info in experts.items() if m in formats),
        ragged=any(
            len(info.shape) == 2 and info.shape[0] % get_format(format).block[0]
            for name, info in source.weights.items()
            if (format := formats.get(name.removesuffix(".weight"))) is not None
        ),
        dtype=_dtype(config),
        some_kept=any(module not in formats for module in experts),
        described=architecture.origin is not None or model_type in architecture.flat_model_types,
    )
    return tuple(judge(written))


def _dtype(config: Mapping[str, Any]) -> str | None:
    """What config.json says that the model computes in, of a vision model its language model."""
    text_config = config.get("text_config")
    sections = (text_config if isinstance(text_config, dict) else {}, config)
    # transformers 5 writes `dtype`, and before it wrote `torch_dtype`.
    named = (section.get(key) for section in sections for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in named if isinstance(dtype, str)), None)


def _dialect(recipe: Recipe, source: SourceModel, assigned: Assignment) -> Dialect:
    """The output's dialect.

    Without a format to convert into it is the source's, or none if nothing stays quantized.
    """
    formats = list(dict.fromkeys(unit.format for unit in assigned.units))
    name = recipe.output.dialect
    if formats:
        return choose_dialect(name, formats, source.model.architecture)
    encoded = {n for n, info in source.weights.items() if isinstance(info, EncodedInfo)}
    if encoded == assigned.dequantized.keys():
        if name not in (None, _PLAIN_DIALECT):
            raise RecipeError(
                f"dialect {name!r}, but every weight is dequantized, which needs none; leave it out"
            )
        return get_dialect(_PLAIN_DIALECT)
    assert source.dialect is not None, "of a source with quantized weights"
    if name is None and source.dialect.name not in DIALECTS:
        raise RecipeError(
            f"the recipe leaves weights in the dialect {source.dialect.name}, which is read and "
            "not written; give them a format, or bf16"
        )
    return source.dialect if name is None else get_dialect(name)


def _left(source: SourceModel, assigned: Assignment) -> dict[str, EncodedInfo]:
    """Quantized weights that no rule speaks of, by name."""
    taken = {weight.info.name for unit in assigned.units for weight in unit.weights}
    taken |= assigned.dequantized.keys()
    return {
        name: info
        for name, info in source.weights.items()
        if isinstance(info, EncodedInfo) and name not in taken
    }


def _warnings_of_source(
    source: SourceModel, back: Sequence[EncodedInfo], config: Mapping[str, Any]
) -> list[str]:
    """What becomes of a quantized source that its owner may not expect; `back` turns into BF16."""
    warnings = []
    if config.get("quantization_config") and source.dialect is None:
        warnings.append(
            "the source has a quantization_config, in config.json or hf_quant_config.json, but "
            "its weights are plain; ours takes its place"
        )
    if back:
        warnings.append(
            f"{len(back)} weights that no rule converts, such as {back[0].name}, are stored as "
            f"{', '.join(dict.fromkeys(info.format for info in back))}; they become BF16, for the "
            "engines of this dialect do not all read them so"
        )
    if source.dropped:
        warnings.append(
            f"{len(source.dropped)} calibrated scales of activations or of the KV cache, such as "
            f"{source.dropped[0].name}, are left out: what is written quantizes weights alone"
        )
    return warnings


def _warnings_of_experts_apart(items: Iterable[Item], model: Model) -> list[str]:
    """Of experts that a BF16 output has one by one where the plain release stacks them."""
    names = [
        item.name
        for item in items
        if isinstance(item, Copy) or (item.is_plain and item.stack is None)
    ]
    apart = [name for name in names if name in model.roles and _is_one_expert_s(model.roles[name])]
    if model.architecture.stacked is None or not apart:
        return []
    return [
        f"{len(apart)} weights of experts, such as {apart[0]}, stay one by one, where the plain "
        f"release of {model.architecture.name} stacks them and transformers may look for stacks: "
        "they are not quantized, or the architecture does not say stacked.transposed"
    ]


def _is_one_expert_s(role: TensorRole) -> bool:
    return role.role == ROUTED_EXPERTS and role.expert is not None


def _check_architecture(
    recipe: Recipe, architecture: Architecture, config: Mapping[str, Any]
) -> None:
    classes = config.get("architectures")
    listed = classes if isinstance(classes, list) else []
    names = {architecture.name, *(name for name in listed if isinstance(name, str))}
    if recipe.architectures and not names & set(recipe.architectures):
        raise RecipeError(
            f"the recipe is for {', '.join(recipe.architectures)}, but this checkpoint is "
            f"{', '.join(sorted(names))}; choose another recipe, or add to its architectures"
        )


def choose_dialect(name: str | None, formats: Sequence[str], architecture: Architecture) -> Dialect:
    """The dialect called `name`, or the first that serves architecture and formats.

    Raises:
        UnsupportedError: it does not serve the architecture, or none carries the formats.
    """
    serving = {d.name: d for d in DIALECTS.values() if _serves(d, architecture)}
    if name is not None:
        dialect = get_dialect(name)
        if name not in serving:
            carrying = [d for d in serving.values() if {*formats} <= {*d.carried}]
            choice = "; or ".join(
                f"{d.name}, which carries {', '.join(d.carried)} ({d.summary})"
                for d in carrying or serving.values()
            )
            raise UnsupportedError(
                f"the dialect {name} is not for {architecture.name}: none of its consumers loads "
                f"the experts of a {architecture.name} checkpoint written in it. Choose {choice}"
            )
        return dialect
    for dialect in serving.values():
        if {*formats} <= {*dialect.carried}:
            return dialect
    raise UnsupportedError(f"no dialect carries all of {', '.join(formats)} in one checkpoint")


def _serves(dialect: Dialect, architecture: Architecture) -> bool:
    if architecture.dialects is None:
        return not dialect.stacks
    return dialect.name in architecture.dialects


def _module(name: str, info: WeightInfo) -> str | None:
    """The module a two-dimensional weight belongs to, or a stack of such, as engines name it."""
    if len(info.shape) == 2 and name.endswith(".weight"):
        return name.removesuffix(".weight")
    block, dot, _ = name.rpartition(".experts.")
    return f"{block}.experts" if dot and len(info.shape) > 2 else None


def _refusals(
    units: Iterable[Unit], dialect: Dialect, fused: Iterable[Sequence[str]]
) -> Iterator[str]:
    """One line for each reason, with the first weight it concerns and how many there are."""
    following = {leaf: {*leaves[i + 1 :]} for leaves in fused for i, leaf in enumerate(leaves)}
    kinds: dict[tuple[object, ...], list[tuple[str, Weight, bool]]] = {}
    for unit in units:
        leaves = {_leaf(weight) for weight in unit.weights}
        for weight in unit.weights:
            rows_follow = not leaves.isdisjoint(following.get(_leaf(weight), ()))
            kind = (unit.format, weight.role, weight.info.shape, weight.info.dtype, rows_follow)
            kinds.setdefault(kind, []).append((unit.format, weight, rows_follow))
    # Weights of one kind are refused for one reason, in messages that differ by name.
    for first, *others in kinds.values():
        if (reason := _refusal(*first, dialect)) is not None:
            more = f". So it is with {len(others)} more weights of this shape" if others else ""
            yield reason + more


def _leaf(weight: Weight) -> str:
    return weight.module.rpartition(".")[2]


def _refusal(format: str, weight: Weight, rows_follow: bool, dialect: Dialect) -> str | None:
    try:
        weight.check_dtype()
        dialect.check(weight.module, format, weight.info.shape, rows_follow=rows_follow)
    except UnsupportedError as error:
        return f"{error}{_others(format, weight)}"
    return None


def _others(format: str, weight: Weight) -> str:
    """Which formats could hold a weight that `format` cannot for its shape."""
    if not _holds(format, weight):
        others = [name for name in CONVERTIBLE if _holds(name, weight)]
        if others:
            return f", or choose a format that holds this shape: {', '.join(others)}"
    return ""


def _holds(format: str, weight: Weight) -> bool:
    try:
        CONVERTIBLE[format].check_shape(weight.info.shape)
    except UnsupportedError:
        return False
    return True


def _items(
    tensors: Mapping[str, TensorInfo],
    source: SourceModel,
    units: Sequence[Unit],
    assigned: Assignment,
    stay: Mapping[str, EncodedInfo],
    *,
    stacked: bool,
) -> Iterator[Item]:
    """Units where their first weight stands, and everything else, in natural order.

    A tensor that holds several weights stands for those that no unit takes. What is quantized and
    neither converted nor staying is dequantized, with `stacked` as the plain release has it. Biases
    of experts that change come along, and are looked at.
    """
    item_of = {w.info.name: u for u in units for w in u.weights}
    left = [
        info
        for name, info in source.weights.items()
        if isinstance(info, EncodedInfo) and name not in item_of and name not in stay
    ]
    plain: dict[str, list[EncodedInfo]] = {}
    for weight in left:
        format = assigned.dequantized.get(weight.name, _BESIDE_QUANTIZED)
        plain.setdefault(format, []).append(weight)
    for format, infos in plain.items():
        dequantizing = dequantizing_units(infos, source.model, format, stacked=stacked)
        item_of |= {w.info.name: unit for unit in dequantizing for w in unit.weights}
    biases = biases_of(item_of, source.model.roles)
    copied: set[str] = set()
    for name, info in source.weights.items():
        found = item_of.get(name)
        if found is None:
            for stored in _stored_in(info, tensors):
                if stored.name not in copied:
                    copied.add(stored.name)
                    yield Copy(info=stored, is_bias=stored.name in biases)
        elif found.name == name:
            yield found


def _stored_in(info: WeightInfo, tensors: Mapping[str, TensorInfo]) -> Sequence[TensorInfo]:
    """The tensors on disk that a weight lies in."""
    if isinstance(info, EncodedInfo):
        return info.parts
    return [tensors[info.place.tensor] if isinstance(info, PartInfo) else info]


def _outputs(items: Sequence[Item], dialect: Dialect) -> list[_Output]:
    """The tensors that items make: one item its own, or the units of a stack the stack's."""
    first = items[0]
    if isinstance(first, Copy):
        return [(first.info.name, first.info.dtype, first.info.shape)]
    assert len(items) == (1 if first.stack is None else first.stack.experts), first.name
    return unit_outputs(first, dialect)


def unit_outputs(unit: Unit, dialect: Dialect) -> list[_Output]:
    """The tensors that a unit makes, or those of the stack that it makes a part of."""
    if unit.stack is None:
        return [
            (f"{weight.module}.{suffix}", dtype, shape)
            for weight in unit.weights
            for suffix, dtype, shape in _stored(dialect, unit.format, weight.info.shape)
        ]
    parts = [_stored(dialect, unit.format, weight.info.shape) for weight in unit.weights]
    return [
        (
            unit.stack.name(suffix),
            dtype,
            unit.stack.shape(unit.stack.joined_shape([own[i][2] for own in parts])),
        )
        for i, (suffix, dtype, _) in enumerate(parts[0])
    ]


@lru_cache(maxsize=1 << 10)
def _stored(dialect: Dialect, format: str, shape: tuple[int, ...]) -> tuple[_Output, ...]:
    """Last name, safetensors dtype and shape of the tensors that a weight becomes."""
    encoding = dialect.encoding(format)
    specs = encoding.specs("weight", shape).values()
    return tuple(
        (suffix, dtype_name(spec.dtype), spec.shape)
        for suffix, spec in zip(encoding.suffixes, specs, strict=True)
    )


def _shards(
    items: Iterable[Item], dialect: Dialect, max_shard_bytes: int
) -> tuple[PlannedShard, ...]:
    """Fill shards in order; what belongs to one unit or one stack stays in one shard."""
    groups: list[tuple[list[Item], list[_Output]]] = []
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


def _destination(item: Item) -> str:
    """The stack an item goes into, else the item itself."""
    if isinstance(item, Copy) or item.stack is None:
        return item.name
    return item.stack.tensor


def _claim(name: str, source: str, writers: dict[str, str]) -> None:
    """Refuse a source that already holds a name we would write."""
    other = writers.setdefault(name, source)
    if other != source:
        raise CheckpointError(
            f"{source}: would be written as {name}, and so would {other}; the source holds a "
            "quantization's tensors beside the weights. Remove them, or fetch the plain release"
        )


def _shard(
    file: str, items: Sequence[Item], outputs: Sequence[_Output], dialect: Dialect
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


def _piece(stack: Stack, suffix: str, whole: TensorSlot) -> TensorSlot:
    """The part of a stack's slot that one expert fills."""
    size_bytes = whole.size_bytes // stack.experts
    return TensorSlot(
        name=stack.piece(suffix),
        dtype=whole.dtype,
        shape=stack.shape_of_one(whole.shape),
        offset=whole.offset + stack.expert * size_bytes,
        size_bytes=size_bytes,
    )


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
    units: Iterable[Unit],
    dialect: Dialect,
    shards: Iterable[PlannedShard],
    quantization_config: Mapping[str, Any],
    source: SourceModel,
    source_files: Mapping[str, Any],
) -> str:
    own = source.model.architecture.definition
    decided: dict[str, Any] = {
        **({} if own is None else {"architecture": own}),
        "moequant": __version__,
        "units": [[[w.info.name for w in u.weights], u.format, dict(u.options)] for u in units],
        "dialect": dialect.name,
        "quantization_config": quantization_config,
        "source_files": source_files,
        "shards": {s.file: hashlib.sha256(s.header).hexdigest() for s in shards},
    }
    if source.dialect is not None:
        # How the source's bytes are read, and what is written without being quantized anew.
        decided["source_quantization"] = source.quantization_config
        decided["recode"] = [unit.recode for unit in units]
    return _sha256_of_json(decided)


def _sha256_of_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
