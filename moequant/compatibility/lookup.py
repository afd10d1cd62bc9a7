"""Whether an engine takes a module for quantized, by the lists of a quantization_config.

Each engine matches names in its own way, and renames and merges modules before. These are the rules
of vLLM 0.33.0 (compressed_tensors/utils.py, utils/config_utils.py: find_matching_patterns,
utils/quant_utils.py: is_layer_skipped, modelopt.py: is_layer_excluded and _resolve_quant_algo) and
SGLang 0.5.23 (compressed_tensors/utils.py, utils.py: is_layer_skipped and _module_path_match,
modelopt_quant.py: is_layer_excluded and _resolve_quant_algo). transformers and moequant read the
lists as `Dialect.reader` does.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from moequant.compatibility.merged_layers import MergedLayers
from moequant.compatibility.modules import ROUTER
from moequant.dialects.config_fields import QUANTIZATION_CONFIG as _WHERE
from moequant.dialects.config_fields import as_mapping, mapping_field, names_field
from moequant.dialects.engine_names import in_vllm, names_of
from moequant.dialects.modelopt_names import KeptInSglang, KeptInVllm
from moequant.dialects.names import REGEX, expert_block
from moequant.dialects.regexes import compile_regex
from moequant.errors import CheckpointError

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from moequant.compatibility.modules import Module

    Lookup = Callable[[Module], bool]
    _MakeLookups = Callable[[Mapping[str, Any], MergedLayers, MergedLayers], dict[str, Lookup]]

_SPLIT = (".qkv_proj", ".gate_up_proj")
"""Merged layers whose parts engines know where a class does not list them."""
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def lookups(
    dialect: str,
    config: Mapping[str, Any],
    modules: Iterable[Module] = (),
    classes: Collection[str] = (),
) -> dict[str, Lookup]:
    """By engine, a function that says whether it takes a module for quantized.

    Engines that are missing read the config as the dialect's reader does.

    Args:
        dialect: name of the dialect.
        config: the quantization_config, completed.
        modules: every module of the checkpoint; engines merge some of them.
        classes: `architectures` of config.json, which engines choose a model class by.

    Raises:
        CheckpointError: a field of the config has the wrong type, or a list has no regular
            expression where it must.
    """
    of_dialect = _BY_DIALECT.get(dialect)
    if of_dialect is None:
        return {}
    names = [module.name for module in modules]
    vllm, sglang = (MergedLayers(engine, names, classes) for engine in ("vLLM", "SGLang"))
    return of_dialect(config, vllm, sglang)


def _compressed_tensors(
    config: Mapping[str, Any], vllm: MergedLayers, sglang: MergedLayers
) -> dict[str, Lookup]:
    return {"vLLM": _ct_vllm(config, vllm), "SGLang": _ct_sglang(config, sglang)}


def _fp8(config: Mapping[str, Any], vllm: MergedLayers, sglang: MergedLayers) -> dict[str, Lookup]:
    kept = names_field(config, "ignored_layers", _WHERE)
    kept = kept or names_field(config, "modules_to_not_convert", _WHERE)
    return {"vLLM": _fp8_vllm(kept, vllm), "SGLang": _fp8_sglang(kept, sglang)}


def _modelopt(
    config: Mapping[str, Any], vllm: MergedLayers, sglang: MergedLayers
) -> dict[str, Lookup]:
    kept = names_field(config, "ignore", _WHERE)
    kept = kept or names_field(config, "exclude_modules", _WHERE)
    layers = mapping_field(config, "quantized_layers", _WHERE)
    in_sglang = _modelopt_lookup(KeptInSglang(kept), layers, sglang, guesses=False)
    if str(config.get("quant_algo")).upper() == "MXFP8":
        # It makes a config of the dialect fp8 of it, with blocks of 1 x 32.
        in_sglang = _fp8_sglang(kept, sglang)
    return {
        "vLLM": _modelopt_lookup(KeptInVllm(kept), layers, vllm, guesses=True),
        "SGLang": in_sglang,
    }


def _every_linear(*engines: str) -> _MakeLookups:
    """Of engines that take all but routers for quantized, whatever the config lists."""
    return lambda config, vllm, sglang: dict.fromkeys(engines, _all_but_routers)


def _all_but_routers(module: Module) -> bool:
    return module.group != ROUTER


def _modelopt_lookup(
    kept: KeptInVllm | KeptInSglang, layers: Collection[str], merged: MergedLayers, *, guesses: bool
) -> Lookup:
    """By the list of kept modules and, of a mixture, by `quantized_layers`.

    Args:
        kept: the list.
        layers: the names in `quantized_layers`; empty of what is no mixture.
        merged: how the engine merges layers.
        guesses: whether it also asks for parts that its class does not list, and takes experts that
            are not listed for what stands beside them, as vLLM does.
    """
    within = {parent for name in layers for parent in _parents(name)}

    def asked(module: Module) -> Iterator[str]:
        block = expert_block(module.name)
        if block is not None:
            yield block
            if guesses:
                yield block.removesuffix(".experts")
            return
        found = merged.of(module.name)
        yield from found.names
        if guesses and (found.merged or "").endswith(_SPLIT):
            yield module.name

    def quantizes(module: Module) -> bool:
        if kept.entry_for(module.name) is not None:
            return False
        names = (name for one in asked(module) for name in names_of(one))
        return not layers or any(name in layers or name in within for name in names)

    return quantizes


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def lacks_linear_target(config: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config lacks what SGLang looks up W4A8 experts by."""
    return "Linear" not in _targets(config) or not is_packed_at_top(config)


def is_packed_at_top(config: Mapping[str, Any]) -> bool:
    """Whether the top of a compressed-tensors config says what SGLang asks of integer experts.

    SGLang reads nothing else at the top where groups have formats of their own.
    """
    return config.get("format") == "pack-quantized"


def _ct_vllm(config: Mapping[str, Any], merged: MergedLayers) -> Lookup:
    ignored = _Names(map(in_vllm, names_field(config, "ignore", _WHERE)))
    targets = [in_vllm(target) for target in _targets(config)]
    named = _Names(targets)
    classes = {target.lower() for target in targets}

    # Once for the experts of a layer, which are looked up by the name of the first.
    @cache
    def takes(name: str) -> bool:
        names = [in_vllm(one) for one in merged.of(name).names]
        if any(map(ignored.match, names)):
            return False
        built = "routedexperts" if expert_block(name) else "linear"
        targeted = any(map(named.match, names))
        return targeted or "linear" in classes or any(c in built for c in classes)

    return lambda module: takes(_of_first_expert(module))


def _ct_sglang(config: Mapping[str, Any], merged: MergedLayers) -> Lookup:
    listed = {*names_field(config, "ignore", _WHERE)}
    ignored = _Names(listed)
    ends = tuple(f".{name}" for name in listed if not name.startswith(REGEX))
    targets = _targets(config)
    named = _Names(targets)
    classes = {target.lower() for target in targets}

    def is_ignored(name: str) -> bool:
        return ignored.match(name) or name.endswith(ends)

    def keeps(own: str | None, whole: str | None) -> bool:
        # Where it asks for the parts of a merged layer, of this only the whole name counts.
        if own is None:
            return whole is not None and is_ignored(whole)
        return is_ignored(own) or whole in listed

    @cache
    def takes(name: str) -> bool | None:
        """None where it stops."""
        found = merged.of(name)
        if keeps(*found):
            return False
        built = "fusedmoe" if expert_block(name) else "linear"
        targeted = any(map(named.match, found.names)) or "linear" in classes
        return targeted or any(c in built for c in classes) or None

    def quantizes(module: Module) -> bool:
        name = _of_first_expert(module)
        block = expert_block(name)
        if block is not None and module.role.projection is not None:
            name = f"{block}.0.{_PROJECTIONS.get(module.role.projection, 'down_proj')}"
        found = takes(name)
        # It stops at a layer that is neither ignored nor targeted, whichever it is.
        return not module.quantized if found is None else found

    return quantizes


def _fp8_vllm(listed: Iterable[str], merged: MergedLayers) -> Lookup:
    kept = {in_vllm(name) for name in listed}
    blocks = [name for name in kept if "experts" in name]

    # Once a layer, not once an expert: each asks a list with some names a layer.
    @cache
    def keeps(block: str) -> bool:
        return any(block in entry for entry in blocks)

    def quantizes(module: Module) -> bool:
        block = expert_block(in_vllm(module.name))
        if block is None:
            return not any(in_vllm(name) in kept for name in merged.of(module.name).names)
        return not keeps(block)

    return quantizes


def _fp8_sglang(listed: Iterable[str], merged: MergedLayers) -> Lookup:
    bare = [name.removeprefix("model.").rstrip(".") for name in listed]
    kept = [*bare, *(f"model.{name}" for name in bare)]
    blocks = [entry for entry in kept if "experts" in entry]

    # Once a layer, not once an expert: each asks a list with some names a layer.
    @cache
    def keeps(name: str, *, is_block: bool) -> bool:
        if any(f".{entry}." in f".{name}." for entry in kept):
            return True
        return is_block and any(name in entry for entry in blocks)

    def quantizes(module: Module) -> bool:
        block = expert_block(module.name)
        own, whole = merged.of(module.name)
        # Of most merged layers it asks for the parts here, whatever the class lists.
        if own is None and (whole or "").endswith(_SPLIT):
            own = module.name
        return not keeps(block or own or whole or module.name, is_block=block is not None)

    return quantizes


class _Names:
    """Exact names, and regular expressions that match from the start."""

    def __init__(self, entries: Iterable[str]) -> None:
        listed = [*entries]
        self._exact = {entry for entry in listed if not entry.startswith(REGEX)}
        self._regexes = [_compile(e[len(REGEX) :]) for e in listed if e.startswith(REGEX)]

    def match(self, name: str) -> bool:
        """Whether an entry matches `name`."""
        return name in self._exact or any(regex.match(name) for regex in self._regexes)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return compile_regex(pattern)
    except ValueError as error:
        raise CheckpointError(f"{_WHERE}: {error}; correct config.json") from error


def _targets(config: Mapping[str, Any]) -> list[str]:
    groups = mapping_field(config, "config_groups", _WHERE)
    where = f"{_WHERE}.config_groups"
    return [
        target
        for name, group in groups.items()
        for target in names_field(as_mapping(group, f"{where}.{name}"), "targets", where)
    ]


def _of_first_expert(module: Module) -> str:
    """The name by which engines look up an expert: that of the first of its layer."""
    block = expert_block(module.name)
    if block is None:
        return module.name
    return f"{block}.0.{module.name.removeprefix(block).split('.', 2)[2]}"


_BY_DIALECT: Mapping[str, _MakeLookups] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fp8-ue8m0": _fp8,
    "w4afp8": _every_linear("SGLang"),
    # Each engine looks up names of its own, and builds routers unquantized.
    "deepseek-v4": _every_linear("vLLM", "SGLang", "transformers", "moequant"),
    "modelopt": _modelopt,
}
"""By dialect, from its config and how vLLM and SGLang merge layers to what `lookups` returns."""
