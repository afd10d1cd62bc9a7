"""The plan of a conversion: a pure function of headers, config and recipe.

No tensor is read. Sizes, shard names, output headers, the index and all refusals are known before
the work begins. The same inputs give the same plan everywhere, so that workers, a restarted run and
`moequant verify` agree.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from moequant._version import __version__
from moequant.compatibility import Verdict, warnings_of
from moequant.conversion.apply_recipe import apply_recipe, keeping_units
from moequant.conversion.gaussian_search import predicts_uncalibrated, with_predictions
from moequant.conversion.items import plan_items, unchanged_weights, unmatched
from moequant.conversion.memory import MemoryBound
from moequant.conversion.output_dialect import output_dialect
from moequant.conversion.plan_warnings import (
    engine_verdicts,
    warnings_of_experts_apart,
    warnings_of_source,
)
from moequant.conversion.recipe import parse_size
from moequant.conversion.refusals import refusals_of, unquantized_refusals
from moequant.conversion.shards import PlannedShard, plan_shards
from moequant.conversion.stack import stack_of
from moequant.conversion.units import Copy, Unit, quantizer_jobs
from moequant.conversion.weighted_search import check_used, needs_statistics
from moequant.dialects import UNQUANTIZED
from moequant.errors import RecipeError, UnsupportedError
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_model import read_source, source_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moequant.conversion.apply_recipe import Assignment
    from moequant.conversion.recipe import Recipe
    from moequant.conversion.units import Item
    from moequant.dialects.base import Dialect
    from moequant.models import Architecture, Model
    from moequant.quantizers import Job
    from moequant.statistics import InputScales, Statistics
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo
    from moequant.weights.source_model import SourceModel
    from moequant.weights.source_weights import WeightInfo


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a conversion will do.

    Attributes:
        model: architecture, sizes and roles of the source.
        recipe: the complete recipe.
        dialect: the dialect of the output.
        items: what is quantized, dequantized and copied, in order.
        shards: the output files; empty if there are refusals.
        quantization_config: the new entry of config.json; empty for none.
        source: the source's weights.
        source_files: size and header digest of every weight file read.
        engines: for each known engine, whether it loads the output; empty if nothing is quantized.
        warnings: one sentence each.
        refusals: why the source cannot be converted; if there are any, nothing is written.
        digest: SHA-256 over everything that determines the output's bytes.
        statistics: of the inputs of routed experts, for weighted searches and static scales of
            activations; None if not given.
        input_scales: a file of static scales; None if not given.
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
    statistics: Statistics | None = None
    input_scales: InputScales | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units to quantize, in order."""
        return tuple(unit for unit in self._works if not unit.is_plain)

    @property
    def dequantized(self) -> tuple[Unit, ...]:
        """The units to dequantize, in order."""
        return tuple(unit for unit in self._works if unit.is_plain)

    @property
    def copies(self) -> tuple[Copy, ...]:
        """The tensors to copy, in order."""
        return tuple(item for item in self.items if isinstance(item, Copy))

    @property
    def needs_statistics(self) -> bool:
        """Whether the bytes of the output depend on the statistics."""
        return any(map(needs_statistics, self.units))

    @property
    def refusal(self) -> UnsupportedError | None:
        """The refusals as an error; None if there are none."""
        return UnsupportedError("\n".join(self.refusals)) if self.refusals else None

    def check_accepted(self) -> None:
        """Raise the refusals, if there are any.

        Raises:
            UnsupportedError: the source cannot be converted.
        """
        if (refusal := self.refusal) is not None:
            raise refusal

    def jobs(self) -> list[Job]:
        """The distinct jobs for a quantizer; for a plan without refusals."""
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
        """Peak memory with `workers`, in addition to interpreter and torch; 0 if refused."""
        return 0 if self.refusals else self.memory.peak_bytes(workers)

    @cached_property
    def memory(self) -> MemoryBound:
        """Upper bounds of the conversion's memory."""
        weights = self.source.weights.values()
        read = sum(len(w.parts) if isinstance(w, EncodedInfo) else 1 for w in weights)
        pieces = sum(len(shard.pieces) for shard in self.shards)
        statistics_bytes = 0 if self.statistics is None else self.statistics.kept_bytes
        return MemoryBound(
            units=self._works, tensors=read + pieces, statistics_bytes=statistics_bytes
        )

    @property
    def _works(self) -> tuple[Unit, ...]:
        return tuple(item for item in self.items if isinstance(item, Unit))


def plan_checkpoint(
    checkpoint: Checkpoint,
    recipe: Recipe,
    own: Sequence[Architecture] = (),
    statistics: Statistics | None = None,
    input_scales: InputScales | None = None,
    *,
    unused_statistics: bool = False,
) -> Plan:
    """The plan for an opened checkpoint; see `make_plan`."""
    with checkpoint.naming_config():
        return make_plan(
            checkpoint.tensors,
            source_config(checkpoint),
            checkpoint.file_bytes,
            recipe,
            own,
            statistics=statistics,
            input_scales=input_scales,
            unused_statistics=unused_statistics,
        )


def make_plan(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    file_bytes: Mapping[str, int],
    recipe: Recipe,
    own: Sequence[Architecture] = (),
    *,
    statistics: Statistics | None = None,
    input_scales: InputScales | None = None,
    unused_statistics: bool = False,
) -> Plan:
    """Plan a conversion.

    Args:
        tensors: every tensor of the source, in natural order.
        config: the source's config.json.
        file_bytes: size of every weight file of the source.
        recipe: what to convert into what, and how to write it.
        own: architectures that a user's file or a record describes.
        statistics: of the inputs of this model's experts, for weighted searches and static scales
            of activations.
        input_scales: static scales of activations of this model.
        unused_statistics: allow statistics that decide no byte of the output.

    Raises:
        StatisticsError: the statistics are of a model of other sizes, or nothing uses them or the
            scales; or a scale is missing.
        CheckpointError: the source is incomplete or contradicts its config.
        UnsupportedError: an unknown architecture, an expert no rule explains, or no such dialect.
        RecipeError: the recipe is for other architectures, splits what must stay together, or
            matches nothing.
    """
    source = read_source(tensors, config, own)
    model = source.model
    _check_architecture(recipe, model.architecture, config)
    assigned = _assign(
        source, recipe, statistics, input_scales, unused_statistics=unused_statistics
    )
    predicted = with_predictions(assigned.units, source)
    dialect = output_dialect(recipe, source, assigned)
    units, unchanged, unnamed = _units(predicted, source, assigned, dialect)
    modules = _module_formats(units, unchanged, source)
    plain = dialect is UNQUANTIZED
    items = tuple(plan_items(tensors, source, units, assigned, unchanged, stacked=plain))
    refusals = (
        *refusals_of(units, dialect, model.architecture.fused),
        *unquantized_refusals(modules.kept, dialect, model.roles),
    )
    shards: tuple[PlannedShard, ...] = ()
    quantization_config: dict[str, Any] = {}
    if not refusals:
        shards = plan_shards(items, dialect, parse_size(recipe.output.max_shard_size))
        quantization_config = dialect.quantization_config(
            modules.formats, modules.kept, modules.static
        )
    source_files = _describe_files(tensors, file_bytes)
    engines = engine_verdicts(modules.formats, source, dialect, config, modules.static)
    warnings = (
        *assigned.warnings,
        *warnings_of_source(source, unnamed, config),
        *(warnings_of_experts_apart(items, model) if plain else ()),
        *warnings_of(engines),
    )
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
        warnings=warnings,
        refusals=refusals,
        digest=_digest_of(
            units, dialect, shards, quantization_config, source, source_files, statistics
        ),
        statistics=statistics,
        input_scales=input_scales,
    )


def _assign(
    source: SourceModel,
    recipe: Recipe,
    statistics: Statistics | None,
    input_scales: InputScales | None,
    *,
    unused_statistics: bool,
) -> Assignment:
    """What the recipe does with the weights; `unused_statistics`: see `make_plan`."""
    model = source.model
    if statistics is not None:
        statistics.check_fits(model)
    assigned = apply_recipe(
        source.weights,
        model.roles,
        recipe,
        model.moe.layers,
        model.architecture.fused,
        statistics,
        input_scales,
        predictable=predicts_uncalibrated(model),
    )
    if not unused_statistics:
        check_used(assigned.units, statistics)
    return assigned


def _units(
    converting: Iterable[Unit], source: SourceModel, assigned: Assignment, dialect: Dialect
) -> tuple[list[Unit], dict[str, EncodedInfo], list[EncodedInfo]]:
    """Units to quantize or to keep quantized, and what becomes of other quantized weights.

    Args:
        converting: the units that rules name.
        source: the source.
        assigned: what the recipe does with it.
        dialect: of the output.

    Returns:
        The units, with those that a rule keeps quantized; by name the weights that are copied
        unchanged; and those that become BF16 though no rule names them.
    """
    left = unmatched(source, assigned)
    unchanged = unchanged_weights(left, source, dialect)
    others = {name: info for name, info in left.items() if name not in unchanged}
    kept = {name: info for name, info in others.items() if name in assigned.kept}
    units = [*converting, *keeping_units(kept, assigned.groups, source.model.roles)]
    if dialect.stacks:
        units = [replace(unit, stack=stack_of(unit.name, source.model)) for unit in units]
    return units, unchanged, [info for name, info in others.items() if name not in kept]


class _ModuleFormats(NamedTuple):
    """What config.json says of modules.

    Attributes:
        formats: format by quantized module.
        kept: the others, of which it may have to say that they are not.
        static: those whose input has a static scale.
    """

    formats: dict[str, str]
    kept: list[str]
    static: set[str]


def _module_formats(
    units: Sequence[Unit], unchanged: Mapping[str, EncodedInfo], source: SourceModel
) -> _ModuleFormats:
    formats = {weight.module: unit.format for unit in units for weight in unit.weights}
    formats |= {info.module: info.format for info in unchanged.values()}
    modules = (_module(name, info) for name, info in source.weights.items())
    kept = [module for module in modules if module is not None and module not in formats]
    static = {weight.module for unit in units if unit.is_static for weight in unit.weights}
    return _ModuleFormats(formats, kept, static)


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


def _module(name: str, info: WeightInfo) -> str | None:
    """The module of a two-dimensional weight, or of a stack, as engines name it."""
    if len(info.shape) == 2 and name.endswith(".weight"):
        return name.removesuffix(".weight")
    block, dot, _ = name.rpartition(".experts.")
    return f"{block}.experts" if dot and len(info.shape) > 2 else None


def _describe_files(
    tensors: Mapping[str, TensorInfo], file_bytes: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Size and header digest of every weight file, by name, sorted."""
    rows: dict[str, list[tuple[Any, ...]]] = {file: [] for file in sorted(file_bytes)}
    for info in sorted(tensors.values(), key=lambda info: info.start):
        rows[info.file].append((info.name, info.dtype, info.shape, info.start, info.stop))
    return {
        file: {"bytes": file_bytes[file], "header_sha256": _sha256_of_json(entries)}
        for file, entries in rows.items()
    }


def _digest_of(
    units: Sequence[Unit],
    dialect: Dialect,
    shards: Iterable[PlannedShard],
    quantization_config: Mapping[str, Any],
    source: SourceModel,
    source_files: Mapping[str, Any],
    statistics: Statistics | None,
) -> str:
    """SHA-256 over everything that determines the output's bytes."""
    own = source.model.architecture.definition
    units = [*units]
    scales = [unit.activation_scales for unit in units]
    decided: dict[str, Any] = {
        **({} if own is None else {"architecture": own}),
        **({} if statistics is None else {"statistics": statistics.digest}),
        **({} if not any(scales) else {"activation_scales": scales}),
        "moequant": __version__,
        "units": [[[w.info.name for w in u.weights], u.format, dict(u.options)] for u in units],
        "dialect": dialect.name,
        "quantization_config": quantization_config,
        "source_files": source_files,
        "shards": {s.file: hashlib.sha256(s.header).hexdigest() for s in shards},
    }
    if any(unit.rounding is not None for unit in units):
        decided["rounding"] = [unit.rounding and asdict(unit.rounding) for unit in units]
    if source.dialect is not None:
        # How the source is decoded, and which units may be requantized without loss.
        decided["source_quantization"] = source.quantization_config
        decided["lossless"] = [unit.lossless for unit in units]
    return _sha256_of_json(decided)


def _sha256_of_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
