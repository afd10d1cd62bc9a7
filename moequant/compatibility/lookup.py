"""Whether an engine takes a module for quantized, by the lists of a quantization_config.

Each engine matches names in its own way, and renames modules before. These are the rules of vLLM
0.33.0 (compressed_tensors/utils.py, utils/quant_utils.py: is_layer_skipped, modelopt.py:
is_layer_excluded) and SGLang 0.5.23 (the files of the same names, and utils.py:
_module_path_match). transformers and moequant read the lists as `Dialect.reader` does.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from moequant.compatibility.modules import ROUTER
from moequant.dialects.config_fields import QUANTIZATION_CONFIG as _WHERE
from moequant.dialects.config_fields import as_mapping, mapping_field, names_field
from moequant.dialects.engine_names import in_vllm, merged_in_vllm
from moequant.dialects.modelopt_names import KeptInSglang, KeptInVllm
from moequant.dialects.names import REGEX, expert_block
from moequant.dialects.regexes import compile_regex
from moequant.errors import CheckpointError

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Mapping

    from moequant.compatibility.modules import Module

    Lookup = Callable[[Module], bool]

_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def lookups(dialect: str, config: Mapping[str, Any]) -> dict[str, Lookup]:
    """By engine, a function that says whether it takes a module for quantized.

    Engines that are missing read the config as the dialect's reader does.

    Args:
        dialect: name of the dialect.
        config: the quantization_config, completed.

    Raises:
        CheckpointError: a field of the config has the wrong type, or a list has no regular
            expression where it must.
    """
    if dialect == "compressed-tensors":
        return {"vLLM": _ct_vllm(config), "SGLang": _ct_sglang(config)}
    if dialect in ("fp8", "fp8-ue8m0"):
        kept = names_field(config, "ignored_layers", _WHERE)
        kept = kept or names_field(config, "modules_to_not_convert", _WHERE)
        return {"vLLM": _fp8_vllm(kept), "SGLang": _fp8_sglang(kept)}
    if dialect == "w4afp8":
        return {"SGLang": _all_but_routers}
    if dialect == "deepseek-v4":
        # Each engine looks up names of its own, and builds routers unquantized.
        return dict.fromkeys(("vLLM", "SGLang", "transformers", "moequant"), _all_but_routers)
    if dialect == "modelopt" and not mapping_field(config, "quantized_layers", _WHERE):
        kept = names_field(config, "ignore", _WHERE)
        kept = kept or names_field(config, "exclude_modules", _WHERE)
        return {
            "vLLM": partial(_by_list, KeptInVllm(kept)),
            "SGLang": partial(_by_list, KeptInSglang(kept)),
        }
    return {}


def _all_but_routers(module: Module) -> bool:
    return module.group != ROUTER


def _by_list(kept: KeptInVllm | KeptInSglang, module: Module) -> bool:
    return kept.entry_for(module.name) is None


def lacks_linear_target(config: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config lacks what SGLang looks up W4A8 experts by."""
    return "Linear" not in _targets(config) or config.get("format") != "pack-quantized"


def _ct_vllm(config: Mapping[str, Any]) -> Lookup:
    ignored = _Names(map(in_vllm, names_field(config, "ignore", _WHERE)))
    targets = [in_vllm(target) for target in _targets(config)]
    named = _Names(targets)
    classes = {target.lower() for target in targets}

    def quantizes(module: Module) -> bool:
        name = in_vllm(_of_first_expert(module))
        if ignored.match(name) or ignored.match(merged_in_vllm(name)):
            return False
        built = "routedexperts" if expert_block(name) else "linear"
        return named.match(name) or "linear" in classes or any(c in built for c in classes)

    return quantizes


def _ct_sglang(config: Mapping[str, Any]) -> Lookup:
    listed = names_field(config, "ignore", _WHERE)
    ignored = _Names(listed)
    ends = tuple(f".{name}" for name in listed if not name.startswith(REGEX))
    targets = _targets(config)
    named = _Names(targets)
    classes = {target.lower() for target in targets}

    def quantizes(module: Module) -> bool:
        name = _of_first_expert(module)
        block = expert_block(name)
        if block is not None and module.role.projection is not None:
            name = f"{block}.0.{_PROJECTIONS.get(module.role.projection, 'down_proj')}"
        if ignored.match(name) or name.endswith(ends):
            return False
        built = "fusedmoe" if block else "linear"
        matched = named.match(name) or "linear" in classes or any(c in built for c in classes)
        # It stops at a layer that is neither ignored nor targeted, whichever it is.
        return matched or not module.quantized

    return quantizes


def _fp8_vllm(listed: Iterable[str]) -> Lookup:
    kept = {in_vllm(name) for name in listed}
    blocks = [name for name in kept if "experts" in name]

    # Once a layer, not once an expert: each asks a list with some names a layer.
    @cache
    def keeps(block: str) -> bool:
        return any(block in entry for entry in blocks)

    def quantizes(module: Module) -> bool:
        name = in_vllm(module.name)
        block = expert_block(name)
        if block is None:
            return name not in kept and merged_in_vllm(name) not in kept
        return not keeps(block)

    return quantizes


def _fp8_sglang(listed: Iterable[str]) -> Lookup:
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
        return not keeps(block or module.name, is_block=block is not None)

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
