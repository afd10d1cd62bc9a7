"""The expected content of a converted checkpoint, derived from its source.

If moequant.json records recipe and dialect, the plan is made again from the source's headers.
Otherwise another tool wrote the checkpoint, and config.json gives the format of each module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moequant.conversion import (
    DEFAULT_WORKERS,
    check_whole_layers,
    converted_config,
    dequantizing_units,
    file_entries,
    plan_checkpoint,
    planned_files,
    recorded_claims,
    recorded_recipe,
    unit_outputs,
    units_of_formats,
)
from moequant.dialects import UNQUANTIZED, find_dialect
from moequant.errors import MoequantError, RecipeError
from moequant.formats import STATIC_SCHEMES, get_format
from moequant.models import CONVERTIBLE_ROLES, ROUTED_EXPERTS, biases_of
from moequant.storage.files import CONFIG_FILE, RECORD_FILE
from moequant.verification.differences import differences
from moequant.weights.converted import readers, stored_places
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_weights import places_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from moequant.conversion import Plan, Unit
    from moequant.dialects import Dialect
    from moequant.models import Architecture, Model, Place
    from moequant.progress import Progress
    from moequant.statistics import InputScales, Statistics
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo
    from moequant.verification.findings import Findings
    from moequant.verification.stored import StoredCheckpoint
    from moequant.weights.source_model import SourceModel
    from moequant.weights.source_weights import WeightInfo

LINEAR_ROLES = (*CONVERTIBLE_ROLES, "lm_head")
"""Roles whose two-dimensional weights are linear layers to every engine, so that config.json must
speak of them."""
_NEVER_CONVERTED = ("router", "shared_expert_gate", "embedding")
# Keys that tools rewrite when they load and save a model; no engine computes anything else by them.
_REWRITTEN_KEYS = ("transformers_version", "_name_or_path")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The expected content of a converted checkpoint.

    Attributes:
        plan: the plan, made again, which determines every byte; None if that is impossible.
        original: the source's weights.
        dialect: the dialect of the checkpoint.
        units: the units that are quantized.
        dequantized: the units that are dequantized.
        copies: tensors of the source that are copied bit for bit.
        tensors: dtype and shape, as in a header, of every tensor that is known in advance.
        possible: names of tensors whose dtype and shape the dialect checks when it decodes them.
        config: the expected config.json.
        files: the bytes of config.json and the index, by file; empty without a plan.
        activations: by module, the scheme of its input where its format does not imply it.
    """

    plan: Plan | None
    original: SourceModel
    dialect: Dialect
    units: tuple[Unit, ...]
    dequantized: tuple[Unit, ...]
    copies: tuple[TensorInfo, ...]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    possible: frozenset[str]
    config: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)

    @property
    def static(self) -> frozenset[str]:
        """Modules whose input has a static scale."""
        return frozenset(m for m, scheme in self.activations.items() if scheme in STATIC_SCHEMES)

    @property
    def model(self) -> Model:
        """What the source is, except how its weights are stored."""
        return self.original.model

    @property
    def items(self) -> tuple[Unit, ...]:
        """All units."""
        return (*self.units, *self.dequantized)

    def biases(self) -> set[str]:
        """Names of copied biases of converted experts, in which NaN and Inf are refused."""
        names = [weight.info.name for item in self.items for weight in item.weights]
        return biases_of(names, self.model.roles)

    def formats(self) -> dict[str, str]:
        """Format by quantized module, converted or copied as quantized in the source."""
        copied = {info.name for info in self.copies}
        left = {
            info.module: info.format
            for info in self.original.weights.values()
            if isinstance(info, EncodedInfo) and info.parts[0].name in copied
        }
        return left | {w.module: unit.format for unit in self.units for w in unit.weights}

    def places(self, module: str, format: str) -> dict[str, Place]:
        """Where each tensor of a converted module lies, by the dialect's name for it."""
        model = self.model
        return stored_places(model.architecture, model.moe, self.dialect, module, format)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the checks of one verification share.

    Attributes:
        source: the source.
        stored: the converted checkpoint.
        expected: its expected content.
        pool: threads with one intra-op thread each, which work on a tensor, unit or layer.
        progress: receives the progress.
        findings: collects the problems.
    """

    source: Checkpoint
    stored: StoredCheckpoint
    expected: Expectation
    pool: Executor
    progress: Progress
    findings: Findings


def expect_by_record(
    source: Checkpoint,
    record: Mapping[str, Any],
    own: Sequence[Architecture],
    findings: Findings,
    statistics: Statistics | None = None,
    input_scales: InputScales | None = None,
) -> Expectation | None:
    """The expectation from moequant.json; contradictions to the source become problems.

    `statistics` and `input_scales` are those that the record names, if any.
    """
    if (version := record.get("schema_version")) != 1:
        message = f"schema_version is {version!r}, but only 1 is supported"
        findings.add("record", RECORD_FILE, message)
        return None
    try:
        recipe = recorded_recipe(record)
    except RecipeError as error:
        field, _, reason = str(error).partition(": ")
        findings.add("record", f"{RECORD_FILE}.{field}", reason)
        return None
    try:
        plan = plan_checkpoint(source, recipe, own, statistics, input_scales)
    except MoequantError as error:
        findings.add("record", RECORD_FILE, f"its recipe does not fit the source: {error}")
        return None
    for refusal in plan.refusals:
        findings.add("record", RECORD_FILE, f"its recipe does not fit the source: {refusal}")
    if plan.refusals:
        return None
    files = planned_files(source, plan)
    wanted = recorded_claims(record, source, plan, workers=DEFAULT_WORKERS)
    wanted["files"] = file_entries(files)
    # A record without a description says that the built-in table was used.
    needed = {*record, "architecture_definition", "files"}
    found = {key: record.get(key) for key in wanted if key in needed}
    for place, message in differences(found, wanted, RECORD_FILE):
        findings.add("record", place, f"{message}, by the source given")
    return Expectation(
        plan=plan,
        original=plan.source,
        dialect=plan.dialect,
        units=plan.units,
        dequantized=plan.dequantized,
        copies=tuple(copy.info for copy in plan.copies),
        tensors={n: (s.dtype, s.shape) for shard in plan.shards for n, s in shard.slots.items()},
        possible=frozenset(),
        config=json.loads(files[CONFIG_FILE]),
        files=files,
        activations={
            weight.module: scheme
            for unit in plan.units
            if unit.is_static and (scheme := get_format(unit.format).static_activations)
            for weight in unit.weights
        },
    )


def expect_by_config(
    source: Checkpoint,
    original: SourceModel,
    stored: Checkpoint,
    findings: Findings,
) -> Expectation | None:
    """The expectation from config.json, as an engine reads it."""
    model, quantization_config = original.model, stored.config.get("quantization_config")
    try:
        plain = quantization_config is None and original.dialect is not None
        dialect = UNQUANTIZED if plain else find_dialect(quantization_config, stored.tensors)
        format_of, activations_of = readers(dialect, quantization_config or {})
        formats = _formats(original, stored, format_of)
        activations = {
            _module(name): scheme for name in formats if (scheme := activations_of(_module(name)))
        }
        scaled = {n for n in formats if activations.get(_module(n)) in STATIC_SCHEMES}
    except MoequantError as error:
        findings.add("config", CONFIG_FILE, str(error))
        return None
    try:
        check_whole_layers(formats, model.roles)
    except RecipeError as error:
        findings.add("config", CONFIG_FILE, str(error))
    fitting = _without_misshapen(original.weights, formats, findings)
    units = units_of_formats(original, fitting)
    dequantized = tuple(_dequantized(original, formats, stored, plain=plain))
    made = (*formats, *(weight.info.name for unit in dequantized for weight in unit.weights))
    taken = {place.tensor for name in made for place in places_of(original.weights[name]).values()}
    taken |= {info.name for info in original.dropped}
    copies = tuple(info for name, info in source.tensors.items() if name not in taken)
    return Expectation(
        plan=None,
        original=original,
        dialect=dialect,
        units=units,
        dequantized=dequantized,
        copies=copies,
        tensors={info.name: (info.dtype, info.shape) for info in copies}
        | {
            name: (dtype, shape)
            for unit in dequantized
            for name, dtype, shape in unit_outputs(unit, dialect)
        },
        possible=frozenset(
            place.tensor
            for name, format in fitting.items()
            for place in stored_places(
                model.architecture, model.moe, dialect, name.removesuffix(".weight"), format
            ).values()
        )
        | {
            scale
            for name in scaled
            for scale in dialect.input_scale_specs(_module(name), formats[name])
        },
        activations=activations,
        config=_foreign_config(source.config, stored.config, dialect),
    )


def _dequantized(
    original: SourceModel, formats: Mapping[str, str], stored: Checkpoint, *, plain: bool
) -> Iterator[Unit]:
    """Units for quantized weights of the source that are plain in the checkpoint."""
    infos = [
        info
        for name, info in original.weights.items()
        if isinstance(info, EncodedInfo)
        and name not in formats
        and not all(_lies_as_in_source(part, stored) for part in info.parts)
    ]
    experts = (i for i in infos if original.model.roles[i.name].role == ROUTED_EXPERTS)
    one_by_one = any(info.name in stored.tensors for info in experts)
    return dequantizing_units(infos, original.model, "bf16", stacked=plain and not one_by_one)


def _formats(
    original: SourceModel, stored: Checkpoint, format_of: Callable[[str], str | None]
) -> dict[str, str]:
    """Format by converted weight."""
    formats: dict[str, str] = {}
    for name, info in original.weights.items():
        role = original.model.roles[name].role
        if not is_matrix(info) or role in _NEVER_CONVERTED:
            continue
        # For an unknown module, the tensors on disk tell whether it is quantized.
        if role not in LINEAR_ROLES and _lies_as_in_source(info, stored):
            continue
        if (format := format_of(_module(name))) is not None:
            formats[name] = format
    return formats


def _module(name: str) -> str:
    """The module of a weight."""
    return name.removesuffix(".weight")


def is_matrix(info: WeightInfo) -> bool:
    """Whether a tensor of the source may be the weight of a linear layer."""
    return len(info.shape) == 2 and info.name.endswith(".weight")


def _lies_as_in_source(info: WeightInfo, stored: Checkpoint) -> bool:
    found = stored.tensors.get(info.name)
    return found is not None and (found.dtype, found.shape) == (info.dtype, info.shape)


def _without_misshapen(
    weights: Mapping[str, WeightInfo], formats: Mapping[str, str], findings: Findings
) -> dict[str, str]:
    """The formats that support their weight's shape; the others become problems."""
    fitting = {}
    for name, format in formats.items():
        try:
            get_format(format).check_shape(weights[name].shape, name)
        except MoequantError as error:
            findings.add("config", name, str(error).removeprefix(f"{name}: "))
        else:
            fitting[name] = format
    return fitting


def _foreign_config(
    source: Mapping[str, Any], found: Mapping[str, Any], dialect: Dialect
) -> dict[str, Any]:
    """The source's config, with fields that other tools may change taken from `found`."""
    wanted = converted_config(source, found.get("quantization_config") or {}, dialect)
    # transformers 5 renamed this key.
    for old, new in (("torch_dtype", "dtype"), ("dtype", "torch_dtype")):
        if old in wanted and old not in found and new in found:
            wanted[new] = wanted.pop(old)
    for key in _REWRITTEN_KEYS:
        wanted.pop(key, None)
        if key in found:
            wanted[key] = found[key]
    return wanted
