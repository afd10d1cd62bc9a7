"""The dialect of NVIDIA Model-Optimizer: NVFP4 and FP8 for vLLM and SGLang; others are read-only.

`quant_algo` says the format, as in MODELOPT of schemes.py, or MIXED_PRECISION, with one for each
module in `quantized_layers`. Codes are `weight`, U8 [N, K/2] for NVFP4; `weight_scale` is E4M3
[N, K/16], and `weight_scale_2` FP32 [], a multiplier, where compressed-tensors stores its
reciprocal. FP8 is E4M3 with one `weight_scale` FP32 []. Scales of activations are only read to run
experts: `input_scale` FP32 [], a multiplier. Older releases have only hf_quant_config.json, whose
`quantization` has the same fields, with `exclude_modules` in place of `ignore`.

Decisions, each with the failure it prevents:

* `W4A16_NVFP4` without scales of activations. For NVFP4, vLLM 0.33 would use an uninitialized
  `input_scale`. With them `NVFP4`, and `input_scale` for every converted module.
* `FP8` with scales of activations is what engines run. Without them they take 1 for experts, and of
  other layers vLLM an uninitialized one; then no group has `input_activations`, for other readers.
* Mixtures of these two as MIXED_PRECISION, FP8 only with scales of activations: in a mixture no
  reader could tell FP8 without them. `quantized_layers` has a block of experts under its own name,
  as Model-Optimizer writes it, and beside the parts of a merged layer the layer itself. SGLang
  0.5.23 finds it by its parts only for models that list them, and DeepSeek and GLM-4.5 do not list
  q, k and v, or gate and up: it would take codes for BF16.
* No hf_quant_config.json: vLLM and SGLang read it only if config.json has no `quantization_config`.
* `ignore` has the full name of every kept module, and none that is the beginning of a converted
  one's. vLLM also matches parts of names, so that `mlp.gate` would keep `mlp.gate_proj`.
* No MLA projection is kept in some layers and converted in others. SGLang 0.5.23 compares only the
  last component of `q_a_proj` and similar names, in all layers.

FP8 with scales by row and FP8 blocks are not written. vLLM and SGLang have no kernel for experts of
the former. Of the latter, vLLM 0.33 expects scales as `weight_scale_inv` for experts and as
`weight_scale` [N/128, 1, K/128, 1] for other layers, SGLang `weight_scale_inv` for both, and the
dialect fp8 loads in all engines. Neither engine loads MXFP4, or INT4 with FP8 activations, in this
dialect. Of MIXED_PRECISION without NVFP4, SGLang takes the experts for INT4; every mixture that is
written has NVFP4.

Sources: NVIDIA/Model-Optimizer 0.47, `torch/export/{quant_utils,convert_hf_config}.py`; vLLM 0.33
`quantization/modelopt.py`; SGLang 0.5.23 `quantization/modelopt_quant.py`.
"""

from __future__ import annotations

import re
from fnmatch import translate
from itertools import combinations
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect
from moequant.dialects.config_fields import QUANTIZATION_CONFIG as _WHERE
from moequant.dialects.config_fields import as_mapping, key_text, mapping_field, names_field
from moequant.dialects.engine_names import merged_in_sglang, merged_in_vllm, names_of
from moequant.dialects.modelopt_names import KeptInSglang, KeptInVllm
from moequant.dialects.names import expert_block
from moequant.dialects.schemes import MODELOPT
from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.formats.base import WHOLE
from moequant.storage.files import HF_QUANT_CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

_WEIGHT_ONLY = {"nvfp4": "W4A16_NVFP4"}
"""`quant_algo` of formats that are written without static scales of activations."""
_STATIC = {"nvfp4": "NVFP4", "fp8_tensor": "FP8"}
"""`quant_algo` of formats that are written with them."""
_NUMBERS = {
    "nvfp4": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    "fp8_tensor": {"dynamic": False, "num_bits": 8, "type": "float"},
}
"""What config groups say of weights, and of activations with static scales."""
_SCHEMES = {"NVFP4": "nvfp4_static", "FP8": "fp8_static"}
"""The scheme of activations by `quant_algo`, unless all config groups say that there is none."""
_MIXED = "MIXED_PRECISION"
_ALGORITHMS = {str(name): format for format, s in MODELOPT.items() for name in s.names}
"""The format of the weights by `quant_algo`."""
_UNREAD = {
    "MXFP4": "MXFP4, which no engine loads in this dialect",
    "W4A8_NVFP4_FP8": "NVFP4 whose kernels round weights to FP8",
    "W4A8_MXFP4_FP8": "MXFP4 with FP8 activations",
    "W4A8_AWQ": "INT4 weights multiplied by pre_quant_scale",
    "W4A16_AWQ": "INT4 weights multiplied by pre_quant_scale",
    "NVFP4_AWQ": "NVFP4 weights multiplied by pre_quant_scale",
    "NVFP4_SVD": "NVFP4 plus a low-rank part of the weights",
    "W8A16": "INT8",
    "W8A8_SQ_PER_CHANNEL": "INT8",
}

_Algorithm = tuple[str, "Mapping[str, object]", str]
"""`quant_algo`, what is said of `group_size` by config key, and the config key of both."""


class ModelOpt(Dialect):
    """`quant_method: modelopt`; the module's docstring has the reasons."""

    name = "modelopt"
    summary = "vLLM and SGLang; what NVIDIA Model-Optimizer writes"
    methods = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8")
    schemes = MODELOPT

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        """As Dialect; also refuses what an engine would treat as kept though it is converted."""
        _check_kept_names(formats, [*blocks, *others])
        described = {
            format: _Described(format, modules, static)
            for format, modules in _by_format(formats).items()
        } or {"nvfp4": _Described("nvfp4", [], static)}
        ignore = sorted(blocks + others)
        if len(described) > 1:
            return {"quant_method": "modelopt", **_mixture(described.values()), "ignore": ignore}
        (only,) = described.values()
        return {
            "quant_method": "modelopt",
            "quant_algo": only.algorithm,
            "config_groups": {"group_0": {"targets": ["Linear"], **only.group}},
            "ignore": ignore,
        }

    def complete(
        self,
        quantization_config: Mapping[str, Any] | None,
        config: Mapping[str, Any],
        read: Callable[[str], Mapping[str, Any] | None],
    ) -> Mapping[str, Any] | None:
        """As Dialect; hf_quant_config.json says it, or says which layer has which format."""
        found = quantization_config
        if found is not None and not _lacks_layers(found):
            return found
        document = read(HF_QUANT_CONFIG_FILE)
        quantization = None if document is None else document.get("quantization")
        if not isinstance(quantization, dict):
            # Who reads the weights says of quantized ones that nothing describes them.
            return found
        return {"quant_method": "modelopt", **quantization, **(found or {})}

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        """As Dialect.

        A module is kept if consecutive components of its name are listed, or if a pattern with `*`
        matches the name or one component; or likewise for the layer into which engines merge it.
        NVFP4 and FP8 are supported if every config group says that activations are not quantized;
        with `weights_only` they do not matter, and other formats are read too.
        """
        algorithm_of = _algorithms_but_kept(config)
        quantizes_activations = _quantizes_activations(config)

        def format_of(module: str) -> str | None:
            found = algorithm_of(module)
            if found is None:
                return None
            name, group_sizes, where = found
            format = _format_of_algorithm(module, name, group_sizes, where)
            is_weight_only = name in _SCHEMES and not quantizes_activations
            if weights_only or is_weight_only or name in _WEIGHT_ONLY.values():
                return format
            raise UnsupportedError(
                f"{module}: {where}.quant_algo is {name}, which moequant reads only as a source; "
                "convert it: moequant convert SOURCE OUTPUT --format NAME"
            )

        return format_of

    def _activations_reader(self, config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect: by the algorithm, unless every config group says that there is none."""
        algorithm_of = _algorithms_but_kept(config)
        quantizes_activations = _quantizes_activations(config)

        def activations_of(module: str) -> str | None:
            found = algorithm_of(module)
            return _SCHEMES.get(found[0]) if found is not None and quantizes_activations else None

        return activations_of


def _lacks_layers(quantization_config: Mapping[str, Any]) -> bool:
    """Whether config.json says MIXED_PRECISION without `quantized_layers`.

    hf_quant_config.json then has the format of each layer.
    """
    return _algorithm_in(quantization_config) == _MIXED and not quantization_config.get(
        "quantized_layers"
    )


def _algorithm_in(entry: Mapping[str, Any]) -> str:
    """`quant_algo` in capitals; a value that is not a string is formatted for errors."""
    stated = entry.get("quant_algo")
    return stated.upper() if isinstance(stated, str) else show(stated)


class _Kept:
    """The names in `ignore`: modules, their parents, and patterns."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name for name in names if "*" not in name}
        patterns = [translate(name) for name in names if "*" in name]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def __contains__(self, module: str) -> bool:
        # An entry may name the layer into which engines merge a module.
        names = {module, merged_in_vllm(module), merged_in_sglang(module)}
        return any(map(self._has, names))

    def _has(self, name: str) -> bool:
        parts = name.split(".")
        runs = combinations(range(len(parts) + 1), 2)
        if any(".".join(parts[start:stop]) in self._names for start, stop in runs):
            return True
        return self._pattern is not None and any(map(self._pattern.match, (name, *parts)))


def _algorithms(config: Mapping[str, Any]) -> Callable[[str], _Algorithm | None]:
    """A function from a module to its algorithm; None if kept.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    overall = _algorithm_in(config)
    if overall != _MIXED:
        group_sizes = {f"{_WHERE}.group_size": config.get("group_size")}
        for where, group in _config_groups(config).items():
            weights = mapping_field(group, "weights", where)
            group_sizes[f"{where}.weights.group_size"] = weights.get("group_size")
        return lambda module: (overall, group_sizes, _WHERE)
    where = f"{_WHERE}.quantized_layers"
    layers = {
        name: as_mapping(entry, f"{where}.{key_text(name)}")
        for name, entry in mapping_field(config, "quantized_layers", _WHERE).items()
    }

    def of_layer(module: str) -> _Algorithm | None:
        if not layers:
            raise UnsupportedError(
                f"{module}: {where} is missing here and in hf_quant_config.json, so the formats of "
                "layers are unknown; fetch the checkpoint again"
            )
        name = next((name for name in _enclosing(module) if name in layers), None)
        if name is None:
            return None
        layer, key = layers[name], f"{where}.{key_text(name)}"
        return _algorithm_in(layer), {f"{key}.group_size": layer.get("group_size")}, key

    return of_layer


def _algorithms_but_kept(config: Mapping[str, Any]) -> Callable[[str], _Algorithm | None]:
    """As `_algorithms`, with None for the modules in `ignore` and `exclude_modules`."""
    names = names_field(config, "ignore", _WHERE)
    kept = _Kept(names + names_field(config, "exclude_modules", _WHERE))
    algorithm_of = _algorithms(config)
    return lambda module: None if module in kept else algorithm_of(module)


def _enclosing(module: str) -> Iterator[str]:
    """A module and its parents, under both names that vision models use for the language model."""
    for name in names_of(module):
        while name:
            yield name
            name = name.rpartition(".")[0]


def _format_of_algorithm(
    module: str, name: str, group_sizes: Mapping[str, object], where: str
) -> str:
    """The format of the weights of the algorithm called `name`.

    Raises:
        UnsupportedError: it is not supported, or has another group size.
    """
    if name not in _ALGORITHMS:
        meaning = f" ({_UNREAD[name]})" if name in _UNREAD else ""
        raise UnsupportedError(
            f"{module}: {where}.quant_algo is {key_text(name)}{meaning}, but moequant reads only "
            f"{', '.join(_ALGORITHMS)} and {_MIXED} of these; use a release in one of them, or the "
            "unquantized one"
        )
    format = _ALGORITHMS[name]
    columns = get_format(format).block[1]
    for key, group_size in group_sizes.items():
        # Model-Optimizer writes 0 or None for no groups.
        if group_size and columns != WHOLE and group_size != columns:
            raise UnsupportedError(
                f"{module}: {key} is {show(group_size)}, but moequant reads {name} only with "
                f"{columns}; use a release with that, or the unquantized one"
            )
    return format


def _quantizes_activations(config: Mapping[str, Any]) -> bool:
    """Whether `config` also quantizes activations; it does unless all groups say no.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    groups = _config_groups(config).values()
    return not groups or any(group.get("input_activations") is not None for group in groups)


def _config_groups(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """`config_groups` by their config keys.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    where = f"{_WHERE}.config_groups"
    groups = mapping_field(config, "config_groups", _WHERE)
    keys = {f"{where}.{key_text(name)}": group for name, group in groups.items()}
    return {key: as_mapping(group, key) for key, group in keys.items()}


def _by_format(formats: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules of each format, in order of the formats' names."""
    found: dict[str, list[str]] = {format: [] for format in sorted({*formats.values()})}
    for module, format in formats.items():
        found[format].append(module)
    return found


class _Described:
    """What config.json says of the modules in one format.

    Attributes:
        format: the format.
        modules: the modules in it.
        is_static: whether their inputs have static scales.

    Raises:
        UnsupportedError: only some of the modules have static scales; names one of each.
    """

    def __init__(self, format: str, modules: Sequence[str], static: Collection[str]) -> None:
        self.format = format
        self.modules = modules
        with_scale = next((module for module in modules if module in static), None)
        weight_only = next((module for module in modules if module not in static), None)
        self.is_static = with_scale is not None
        if with_scale is not None and weight_only is not None:
            raise UnsupportedError(
                f"{with_scale} has a static scale of activations and {weight_only} has none, but "
                f"in the dialect modelopt all modules in {format} have one, or none has; give both "
                "activation_scales, keep one, or choose the dialect compressed-tensors"
            )

    @property
    def algorithm(self) -> str:
        """Its `quant_algo`."""
        return (_STATIC if self.is_static else _STATIC | _WEIGHT_ONLY)[self.format]

    @property
    def group(self) -> dict[str, Any]:
        """Its config group, without targets."""
        numbers = _NUMBERS[self.format]
        inputs = {"input_activations": {**numbers}} if self.is_static else {}
        return {"weights": numbers, **inputs}

    @property
    def layer(self) -> dict[str, Any]:
        """Its entry in `quantized_layers`."""
        numbers = _NUMBERS[self.format]
        sizes = {"group_size": numbers["group_size"]} if "group_size" in numbers else {}
        return {"quant_algo": self.algorithm, **sizes}


def _mixture(described: Iterable[_Described]) -> dict[str, Any]:
    """What config.json says of several formats.

    Raises:
        UnsupportedError: FP8 without static scales, which engines do not run.
    """
    groups: dict[str, dict[str, Any]] = {}
    layers: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(described):
        if not one.is_static and one.format not in _WEIGHT_ONLY:
            raise UnsupportedError(
                f"{one.modules[0]}: {one.format} without a static scale of activations beside "
                "another format. In the dialect modelopt engines quantize its inputs by that "
                "scale: of experts they take 1 for it, of other layers vLLM an uninitialized one. "
                "Give it activation_scales, or choose fp8_channel in the dialect "
                "compressed-tensors"
            )
        targets = sorted({expert_block(module) or module for module in one.modules})
        groups[f"group_{number}"] = {"targets": targets, **one.group}
        merged = {f(module) for module in targets for f in (merged_in_vllm, merged_in_sglang)}
        layers |= dict.fromkeys(sorted({*targets} | merged), one.layer)
    return {"quant_algo": _MIXED, "config_groups": groups, "quantized_layers": layers}


def _check_kept_names(formats: Iterable[str], kept: Iterable[str]) -> None:
    """Check that no engine would treat a converted module as kept because of the list.

    Raises:
        UnsupportedError: an engine would; the message names both modules.
    """
    names = [*kept]
    for listed in (KeptInVllm(names), KeptInSglang(names)):
        for module in formats:
            entry = listed.entry_for(module)
            if entry is not None:
                raise UnsupportedError(
                    f"{module} is converted and {entry} is kept, but in the dialect modelopt "
                    f"engines would treat {module} as kept because of that name; convert both, "
                    "keep both, or choose the dialect compressed-tensors"
                )
