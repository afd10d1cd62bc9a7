"""Defects that config.json and the headers of a checkpoint show.

The ids are those of rules.toml, which says what each engine makes of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from moequant.compatibility.facts import Defect
from moequant.compatibility.lookup import is_packed_at_top, lacks_linear_target, lookups
from moequant.compatibility.modelopt_defects import modelopt_defects
from moequant.compatibility.modules import MTP, OTHER, ROUTER
from moequant.compatibility.rules import ENGINES
from moequant.dialects.compressed_tensors import input_arguments
from moequant.formats import STATIC_SCHEMES, get_format
from moequant.formats.base import WHOLE
from moequant.models import ROUTED_EXPERTS
from moequant.weights.source_model import CODE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from moequant.compatibility.modules import Module
    from moequant.dialects import Dialect
    from moequant.dialects.input_scale import InputScale
    from moequant.models import Architecture
    from moequant.storage.headers import TensorInfo

_GROUPS = {ROUTED_EXPERTS: "experts", "linears": "linears", ROUTER: "router", MTP: "mtp"}


def header_defects(
    modules: Sequence[Module],
    tensors: Mapping[str, TensorInfo],
    architecture: Architecture,
    dialect: Dialect,
    config: Mapping[str, Any],
    classes: Collection[str] = (),
) -> Iterator[Defect]:
    """The defects that headers and config show.

    Args:
        modules: of `modules_in`.
        tensors: every tensor of the checkpoint.
        architecture: its architecture.
        dialect: the dialect of its quantized weights.
        config: its quantization_config, completed.
        classes: `architectures` of its config.json.

    Raises:
        CheckpointError: a list of the config is malformed.
    """
    yield from _misread(modules, dialect, config, classes)
    # Of what is in no list that is asked about here, nobody takes codes that config.json denies.
    denied = (m.name for m in modules if m.group == OTHER and m.stated is None)
    yield from _one("unmatched-linears", denied)
    yield from _one("mixed-experts", _mixed_experts(modules))
    yield from _mixed_merged(modules, architecture)
    yield from _one("ragged-merged-rows", _ragged_merged_rows(modules, architecture))
    yield from _one("missing-weight-scales", _missing_scales(modules, dialect))
    missing = [*_missing_input_scales(modules, tensors, dialect, config)]
    for id, of_layer in (("missing-input-scales", False), ("missing-fp8-input-scales", True)):
        yield from _one(id, (m.name for m, scale in missing if scale.of_layer is of_layer))
    routers = (m.name for m in modules if m.group == ROUTER and m.quantized)
    yield from _one("quantized-router", routers)
    biases = (
        name
        for name, info in tensors.items()
        if info.dtype in CODE_DTYPES
        and name.endswith("bias")
        and architecture.classify(name).role == "router_bias"
    )
    yield from _one("quantized-router-bias", biases)
    if dialect.name == "modelopt":
        yield from modelopt_defects(modules, config)
    if dialect.name == "compressed-tensors":
        if lacks_linear_target(config):
            yield from _one("no-linear-target", _integer_experts(modules))
        if not is_packed_at_top(config):
            yield from _one("no-packed-format", _packed_int4_experts(modules))
        yield from _one("unpacked-codes", _unpacked(modules))
        yield from _one("int8-activations", _with_int8_activations(modules, config))


def _one(id: str, names: Iterable[str]) -> Iterator[Defect]:
    found = tuple(names)
    if found:
        yield Defect(id=id, names=found)


def _misread(
    modules: Sequence[Module],
    dialect: Dialect,
    config: Mapping[str, Any],
    classes: Collection[str],
) -> Iterator[Defect]:
    """Modules that engines take for quantized or not, unlike how they are stored."""
    own = lookups(dialect.name, config, modules, classes)
    mixed = {*_mixed_experts(modules)}
    engines: dict[tuple[str, tuple[str, ...]], set[str]] = defaultdict(set)
    for engine in ENGINES.values():
        quantizes = own.get(engine.name, _as_stated)
        wrong: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            if module.group == OTHER:
                continue
            # Of a layer whose experts are in several forms, no list would be right.
            if module.name not in mixed and quantizes(module) != module.quantized:
                kind = "unmatched" if module.quantized else "plain"
                wrong[f"{kind}-{_GROUPS[module.group]}"].append(module.name)
        for id, names in wrong.items():
            engines[id, tuple(names)].add(engine.name)
    for (id, listed), concerned in engines.items():
        yield Defect(id=id, names=listed, engines=frozenset(concerned))


def _as_stated(module: Module) -> bool:
    return module.stated is not None


def _mixed_experts(modules: Iterable[Module]) -> list[str]:
    """Experts in another form than most of their layer."""
    layers: dict[int | None, list[Module]] = defaultdict(list)
    for module in modules:
        if module.role.role == ROUTED_EXPERTS:
            layers[module.role.layer].append(module)
    found = []
    for experts in layers.values():
        forms = Counter(_form(module) for module in experts)
        if len(forms) > 1:
            most = forms.most_common(1)[0][0]
            found += [module.name for module in experts if _form(module) != most]
    return found


def _form(module: Module) -> tuple[bool, str | None]:
    return module.quantized, module.stated if module.quantized else None


def _mixed_merged(modules: Iterable[Module], architecture: Architecture) -> Iterator[Defect]:
    """Linear layers in another form than others that engines merge with them."""
    set_of = {leaf: number for number, leaves in enumerate(architecture.fused) for leaf in leaves}
    merged: dict[tuple[str, int], list[Module]] = defaultdict(list)
    for module in modules:
        parent, _, leaf = module.name.rpartition(".")
        if module.group == "linears" and leaf in set_of:
            merged[parent, set_of[leaf]].append(module)
    found: list[tuple[str, str]] = []
    for together in merged.values():
        first = next((module for module in together if module.quantized), None)
        if first is not None:
            beside = f"beside {first.name.rpartition('.')[2]} in {first.stated or 'codes'}"
            found += [(m.name, beside) for m in together if _form(m) != _form(first)]
    if found:
        names = tuple(name for name, _ in found)
        yield Defect(id="mixed-merged", names=names, detail=found[0][1])


def _ragged_merged_rows(modules: Iterable[Module], architecture: Architecture) -> Iterator[str]:
    """Layers in FP8 blocks whose rows do not fill the last one, and others' rows follow."""
    following = {
        leaf: {*leaves[i + 1 :]} for leaves in architecture.fused for i, leaf in enumerate(leaves)
    }
    linears = {m.name: m for m in modules if m.group == "linears" and m.quantized}
    for name, module in linears.items():
        parent, _, leaf = name.rpartition(".")
        rows = block_rows(module)
        if rows is None or module.shape is None or module.shape[0] % rows == 0:
            continue
        if any(f"{parent}.{other}" in linears for other in following.get(leaf, ())):
            yield name


def _integer_experts(modules: Iterable[Module]) -> Iterator[str]:
    """Experts of integer codes whose inputs are quantized too."""
    for module in modules:
        if module.group == ROUTED_EXPERTS and module.stated is not None:
            format = get_format(module.stated)
            if format.element.name.startswith("int") and format.activations != "none":
                yield module.name


def _unpacked(modules: Iterable[Module]) -> Iterator[str]:
    """Modules of INT4 codes, one in a byte, as compressed-tensors' int-quantized has them."""
    for module in modules:
        codes = module.parts.get("weight")
        if module.stated == "int4" and codes is not None and codes.dtype == "I8":
            yield module.name


def _packed_int4_experts(modules: Iterable[Module]) -> Iterator[str]:
    """Experts of INT4 codes, eight in a word."""
    for module in modules:
        is_expert = module.group == ROUTED_EXPERTS and module.stated == "int4"
        if is_expert and "weight_packed" in module.parts:
            yield module.name


def _with_int8_activations(modules: Iterable[Module], config: Mapping[str, Any]) -> Iterator[str]:
    """Experts of packed INT4 codes whose inputs are quantized to INT8."""
    input_of = input_arguments(config)
    for name in _packed_int4_experts(modules):
        stated = input_of(name)
        if stated and str(stated.get("type", "int")).lower() == "int":
            yield name


def block_rows(module: Module) -> int | None:
    """The rows that share a scale; None if that is one, or not known."""
    if module.stated is None:
        return None
    rows = get_format(module.stated).block[0]
    return None if rows in (1, WHOLE) else rows


def _missing_scales(modules: Iterable[Module], dialect: Dialect) -> Iterator[str]:
    for module in modules:
        if module.stated is None or not module.quantized or module.stated not in dialect.encodings:
            continue
        encoding = dialect.encodings[module.stated]
        # Where a format has one scale, several names are other writers' names for it.
        there = [s in module.parts for s in encoding.scales]
        if not (all(there) if encoding.format.has_global_scale else any(there)):
            yield module.name


def _missing_input_scales(
    modules: Iterable[Module],
    tensors: Mapping[str, TensorInfo],
    dialect: Dialect,
    config: Mapping[str, Any],
) -> Iterator[tuple[Module, InputScale]]:
    """Modules whose input has a static scale by config.json and none in the files."""
    activations_of: Callable[[str], str | None] = dialect.activations_reader(config)
    for module in modules:
        if module.group != ROUTED_EXPERTS or not module.quantized or module.stated is None:
            continue
        scale = dialect.input_scale(module.stated)
        if (
            scale is not None
            and activations_of(module.name) in STATIC_SCHEMES
            and scale.name_of(module.name) not in tensors
        ):
            yield module, scale
