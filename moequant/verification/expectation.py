"""What a converted checkpoint must hold, worked out from its source.

Two ways to know how it was made: moequant.json records recipe and dialect, so the plan can be made
again from the source's headers; or another tool wrote it, and config.json alone says which module
is in which format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from moequant.conversion import Recipe, plan_checkpoint
from moequant.conversion.assign import Unit, Weight
from moequant.conversion.commit import RECORD_FILE, converted_config
from moequant.conversion.recipe import Verify
from moequant.dialects import find_dialect
from moequant.errors import MoequantError
from moequant.formats import get_format
from moequant.models import CONVERTIBLE_ROLES, ROUTED_EXPERTS, fused_sets
from moequant.verification.differences import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moequant.checkpoint.headers import TensorInfo
    from moequant.checkpoint.source import Checkpoint
    from moequant.conversion import Plan
    from moequant.dialects import Dialect
    from moequant.models import TensorRole
    from moequant.verification.findings import Findings

    FormatOf = Callable[[str], str | None]

LINEAR_ROLES = (*CONVERTIBLE_ROLES, "lm_head")
"""Roles whose two-dimensional weights are linear layers to every engine, so that config.json must
speak of them."""
_NEVER_CONVERTED = ("router", "shared_expert_gate", "embedding")
# What tools that load and save a model write anew; no engine computes anything else by them.
_REWRITTEN_KEYS = ("transformers_version", "_name_or_path")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What must be there.

    Attributes:
        method: "bytes" where everything is known to the last byte, else "bounds".
        dialect: whose names the tensors have.
        units: what is converted.
        copies: tensors of the source that come along bit for bit.
        tensors: dtype and shape, as a header has them, of every tensor known beforehand.
        possible: names of tensors whose dtype and shape the dialect judges when it reads them.
        config: config.json.
        max_lost_db: how far the SQNR of a weight may fall below what our quantizer reaches.
    """

    method: Literal["bytes", "bounds"]
    dialect: Dialect
    units: tuple[Unit, ...]
    copies: tuple[TensorInfo, ...]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    possible: frozenset[str]
    config: Mapping[str, Any]
    max_lost_db: float

    def formats(self) -> dict[str, str]:
        """Format by converted module."""
        return {weight.module: unit.format for unit in self.units for weight in unit.weights}


def expect_by_record(
    source: Checkpoint, record: Mapping[str, Any], findings: Findings
) -> Expectation | None:
    """By moequant.json, which need not be true: what contradicts the source is a problem."""
    plan = _plan_again(source, record, findings)
    if plan is None:
        return None
    claims = {key: record.get(key) for key in ("architecture", "source")}
    recorded_source = claims["source"] if isinstance(claims["source"], dict) else {}
    wanted = {
        "architecture": plan.architecture.name,
        "source": {**recorded_source, "files": plan.source_files},
    }
    for place, message in differences(claims, wanted, RECORD_FILE):
        findings.add("record", place, f"{message}, by the source given")
    return Expectation(
        method="bytes",
        dialect=plan.dialect,
        units=tuple(plan.units),
        copies=tuple(copy.info for copy in plan.copies),
        tensors={n: (s.dtype, s.shape) for shard in plan.shards for n, s in shard.slots.items()},
        possible=frozenset(),
        config=converted_config(source.config, plan.quantization_config),
        max_lost_db=plan.recipe.verify.max_sqnr_loss_db,
    )


def _plan_again(source: Checkpoint, record: Mapping[str, Any], findings: Findings) -> Plan | None:
    if record.get("schema_version") != 1:
        found = record.get("schema_version")
        findings.add("record", RECORD_FILE, f"schema_version is {found!r}, and we know 1 only")
        return None
    try:
        recipe = Recipe.model_validate(record.get("recipe"))
        plan = plan_checkpoint(source, recipe, dialect=str(record.get("dialect")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (RECORD_FILE, "recipe", *first["loc"])))
        findings.add("record", place, first["msg"])
        return None
    except MoequantError as error:
        findings.add("record", RECORD_FILE, f"its recipe does not fit the source: {error}")
        return None
    for refusal in plan.refusals:
        findings.add("record", RECORD_FILE, f"its recipe does not fit the source: {refusal}")
    return None if plan.refusals else plan


def expect_by_config(
    source: Checkpoint,
    roles: Mapping[str, TensorRole],
    stored: Checkpoint,
    findings: Findings,
) -> Expectation | None:
    """By config.json, as any engine would take it."""
    try:
        dialect = find_dialect(stored.config.get("quantization_config"))
        format_of = dialect.reader(stored.config["quantization_config"])
        formats = _formats(source, roles, stored, format_of)
    except MoequantError as error:
        findings.add("config", "config.json", str(error))
        return None
    _check_whole_layers(formats, roles, findings)
    units = _units(source, roles, formats, findings)
    converted = {weight.info.name: unit for unit in units for weight in unit.weights}
    copies = tuple(info for name, info in source.tensors.items() if name not in formats)
    return Expectation(
        method="bounds",
        dialect=dialect,
        units=units,
        copies=copies,
        tensors={info.name: (info.dtype, info.shape) for info in copies},
        possible=frozenset(
            f"{name.removesuffix('weight')}{suffix}"
            for name, unit in converted.items()
            for suffix in dialect.suffixes[unit.format]
        ),
        config=_foreign_config(source.config, stored.config),
        max_lost_db=Verify().max_sqnr_loss_db,
    )


def _formats(
    source: Checkpoint,
    roles: Mapping[str, TensorRole],
    stored: Checkpoint,
    format_of: FormatOf,
) -> dict[str, str]:
    """Format by converted weight."""
    formats: dict[str, str] = {}
    for name, info in source.tensors.items():
        role = roles[name].role
        if not is_matrix(info) or role in _NEVER_CONVERTED:
            continue
        # Whether a module we do not know is linear, and config.json speaks of it, the file tells.
        if role not in LINEAR_ROLES and _lies_as_in_source(info, stored):
            continue
        if (format := format_of(name.removesuffix(".weight"))) is not None:
            formats[name] = format
    return formats


def is_matrix(info: TensorInfo) -> bool:
    """Whether a tensor of the source may be the weight of a linear layer."""
    return len(info.shape) == 2 and info.name.endswith(".weight")


def _lies_as_in_source(info: TensorInfo, stored: Checkpoint) -> bool:
    found = stored.tensors.get(info.name)
    return found is not None and (found.dtype, found.shape) == (info.dtype, info.shape)


def _check_whole_layers(
    formats: Mapping[str, str], roles: Mapping[str, TensorRole], findings: Findings
) -> None:
    """Engines run all experts of a layer through one kernel."""
    first: dict[int | None, tuple[str, str | None]] = {}
    for name, role in roles.items():
        if role.role != ROUTED_EXPERTS:
            continue
        format = formats.get(name)
        reference, wanted = first.setdefault(role.layer, (name, format))
        if format != wanted:
            findings.add(
                "config", name, f"{format or 'not converted'}, but {reference} is {wanted or 'not'}"
            )


def _units(
    source: Checkpoint,
    roles: Mapping[str, TensorRole],
    formats: Mapping[str, str],
    findings: Findings,
) -> tuple[Unit, ...]:
    """Converted weights in the sets that engines fuse; options are our defaults."""
    set_of = {leaf: i for i, leaves in enumerate(fused_sets()) for leaf in leaves}
    groups: dict[tuple[str, object, str], list[Weight]] = {}
    for name, format in formats.items():
        weight = Weight(info=source.tensors[name], role=roles[name].role)
        weight.check_dtype()
        try:
            get_format(format).check_shape(weight.info.shape, name)
        except MoequantError as error:
            findings.add("config", name, str(error).removeprefix(f"{name}: "))
            continue
        parent, _, leaf = weight.module.rpartition(".")
        groups.setdefault((parent, set_of.get(leaf, leaf), format), []).append(weight)
    return tuple(
        Unit(
            weights=tuple(weights),
            format=format,
            options=tuple(get_format(format).resolve_options().items()),
        )
        for (_, _, format), weights in groups.items()
    )


def _foreign_config(source: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The source's config with what other tools may write anew taken from `found`."""
    wanted = converted_config(source, found["quantization_config"])
    # transformers 5 renamed this key.
    for old, new in (("torch_dtype", "dtype"), ("dtype", "torch_dtype")):
        if old in wanted and old not in found and new in found:
            wanted[new] = wanted.pop(old)
    for key in _REWRITTEN_KEYS:
        wanted.pop(key, None)
        if key in found:
            wanted[key] = found[key]
    return wanted
