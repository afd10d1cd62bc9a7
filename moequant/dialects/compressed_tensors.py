"""The dialect of llm-compressor, for vLLM, and in part for SGLang and transformers.

Decisions, each with the failure it prevents:

* Every group states its `format`. Otherwise compressed-tensors assumes `int-quantized`, unpacked
  codes, for INT4 weights with FP8 activations.
* A single format targets `Linear`. SGLang 0.5.23 looks up the scheme of W4A8 experts by that word.
* `ignore` has the full name of every kept module. Otherwise SGLang raises for a linear layer that
  is neither ignored nor targeted, and transformers expects scales that do not exist.
* Beside kept parts of a layer that engines merge, `ignore` has the merged one, such as `qkv_proj`.
  Most model classes of SGLang 0.5.23, as those of Mixtral and DeepSeek, find it only by that name.
* A kept block of experts is ignored by a regex, because SGLang looks up `experts.0.gate_proj` even
  for Mixtral, whose files have `w1`.
* A regex leaves the prefix of a name open, because vLLM renames modules of vision models in plain
  names but not in regexes.

Several formats in a checkpoint have one group each, which targets all children of a parent by a
regex, because SGLang also looks up fused names such as `qkv_proj`. Only `w4a8` keeps `Linear` and
sets the top-level `format`, because SGLang accepts nothing else. Its group comes last: transformers
5.24 has one scheme for all experts, that of the first group with a regex containing `experts`, and
one for all other modules, that of the first group without. So transformers cannot load routed
experts in two formats; vLLM and SGLang can.

Sources: compressed-tensors 0.20 `quantization/quant_scheme.py` (presets W4AFP8, NVFP4A16,
MXFP4A16, FP8_BLOCK) and `utils/match.py`; vLLM 0.33 and SGLang 0.5.23
`quantization/compressed_tensors/`; transformers 5.24 `integrations/compressed_tensors.py`.
"""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Any

import torch

from moequant.dialects.base import Dialect, no_activations
from moequant.dialects.config_fields import QUANTIZATION_CONFIG as _WHERE
from moequant.dialects.config_fields import as_mapping, key_text, mapping_field, names_field
from moequant.dialects.engine_names import merged_in_sglang, merged_in_vllm, with_merged_layers
from moequant.dialects.names import ModulePatterns, NamePatterns
from moequant.dialects.schemes import COMPRESSED_TENSORS
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats.base import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from moequant.dialects.schemes import Scheme
    from moequant.dialects.tensors import Block


_SCALE_DTYPES = {
    torch.float8_e4m3fn: "torch.float8_e4m3fn",
    torch.float8_e8m0fnu: "torch.uint8",
}
"""By dtype of the scale; schemes with other scales do not state it."""
_ACTIVATIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "fp8_token": {"strategy": "token"},
    "fp8_group128": {"strategy": "group", "group_size": 128},
}


def _name(scheme: Scheme) -> str:
    """The library's name of the encoding."""
    return str(scheme.names[0])


def _weights(scheme: Scheme) -> dict[str, Any]:
    """The quantization arguments of weights, which follow from the format."""
    format = scheme.encoding.format
    rows, columns = format.block
    if rows == WHOLE:
        blocks: dict[str, Any] = {"strategy": "tensor"}
    elif rows > 1:
        blocks = {"strategy": "block", "block_structure": [rows, columns]}
    elif columns == WHOLE:
        blocks = {"strategy": "channel"}
    else:
        blocks = {"strategy": "tensor_group" if format.has_global_scale else "group"}
        if not scheme.any_group:
            blocks["group_size"] = columns
    return {
        "num_bits": format.element.bits,
        "type": "int" if format.element.name.startswith("int") else "float",
        **blocks,
        "symmetric": True,
        "dynamic": False,
        **_scale_dtype(scheme),
    }


def _scale_dtype(scheme: Scheme) -> dict[str, str]:
    """The argument that states the dtype of scales; none where it is not stated."""
    scale = _SCALE_DTYPES.get(scheme.encoding.format.scale_dtype)
    return {} if scale is None else {"scale_dtype": scale}


def _input_activations(scheme: Scheme) -> dict[str, Any] | None:
    """The quantization arguments of activations; None if they are not quantized."""
    groups = _ACTIVATIONS[scheme.encoding.format.activations]
    if groups is None:
        return None
    return {"num_bits": 8, "type": "float", **groups, "symmetric": True, "dynamic": True}


_FOUR_BITS = {"num_bits": 4, "type": "float", "symmetric": True}
_STATED_ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4": (
        "nvfp4_static",
        # Scales of groups are computed, the global scale is not.
        {**_FOUR_BITS, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    ),
    "mxfp4": (
        "mxfp4",
        {**_FOUR_BITS, "strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "fp8_tensor": (
        "fp8_static",
        {**_FOUR_BITS, "num_bits": 8, "strategy": "tensor", "dynamic": False},
    ),
}
"""By format of the weights, a scheme of activations that it does not imply, and its arguments.

What llm-compressor's presets NVFP4, MXFP4 and FP8 write.
"""

_STATIC = " with static scales of activations"
"""After a format's name, in place of its own activations."""

# In a mixed checkpoint, the format that targets `Linear` and sets the top-level `format`.
_LINEAR = "w4a8"

_STATED = list(dict.fromkeys(str(n) for s in COMPRESSED_TENSORS.values() for n in s.names))

# Defaults of missing fields; a missing `strategy` follows from the group size.
_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}

# If one of these fields is not empty, a weight is more than its codes and scales.
_MUST_BE_EMPTY = ("transform_config", "sparsity_config", "linear_fp8_config")


class CompressedTensors(Dialect):
    """`quant_method: compressed-tensors`; the module's docstring has the reasons."""

    name = "compressed-tensors"
    summary = "vLLM, and in part SGLang and transformers; what llm-compressor writes"
    methods = ("compressed-tensors", "compressed_tensors")
    schemes = COMPRESSED_TENSORS

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        patterns = ModulePatterns.among((*formats, *blocks, *others))
        kinds = {m: f + (_STATIC if m in static else "") for m, f in formats.items()}
        targets = _targets(kinds, patterns)
        groups = [_group(kind, of_kind) for kind, of_kind in targets.items()]
        kept = with_merged_layers(others, formats, merged_in_vllm, merged_in_sglang)
        return {
            "quant_method": "compressed-tensors",
            "format": _overall_format([kind.removesuffix(_STATIC) for kind in targets]),
            "quantization_status": "compressed",
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
            "ignore": [*sorted(kept), *map(patterns.of_block, blocks)],
            "kv_cache_scheme": None,
        }

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        """As Dialect.

        As vLLM matches: `ignore` first, then the first target with the module's name or a regex
        for it, then a group that targets `Linear`.
        """
        problem = _unreadable_config(config)
        groups = _Groups(config)
        schemes = {
            where: _format_of_group(group, config, where, weights_only)
            for where, group in groups.by_place.items()
        }

        def format_of(module: str) -> str | None:
            where = groups.of(module)
            if where is None:
                return None
            scheme = problem or schemes[where]
            if isinstance(scheme, UnsupportedError):
                raise UnsupportedError(f"{module}: {scheme}")
            return scheme

        return format_of

    def _block_reader(self, config: Mapping[str, Any]) -> Callable[[str], Block | None]:
        """As Dialect: groups of columns, rows, or the whole weight, by `strategy`."""
        groups = _Groups(config)

        def block_of(module: str) -> Block | None:
            where = groups.of(module)
            if where is None:
                return None
            return _block(mapping_field(groups.by_place[where], "weights", where), where)

        return block_of

    def _activations_reader(self, config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect: NVFP4 with a static global scale, MXFP4, and FP8 with a static scale."""
        groups = _Groups(config)
        schemes = {
            where: _stated_activations(group, config, where)
            for where, group in groups.by_place.items()
        }
        if not any(schemes.values()):
            return no_activations

        def activations_of(module: str) -> str | None:
            where = groups.of(module)
            return None if where is None else schemes[where]

        return activations_of


def input_arguments(config: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any]]:
    """A function from a module to the quantization arguments of its input; empty without any.

    Args:
        config: a `quantization_config` of this dialect.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    groups = _Groups(config)
    stated = {
        where: mapping_field(group, "input_activations", where)
        for where, group in groups.by_place.items()
    }
    return lambda module: stated.get(groups.of(module) or "", {})


class _Groups:
    """The config groups, and which one targets a module.

    Attributes:
        by_place: each group by its place in config.json.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._ignored = NamePatterns(names_field(config, "ignore", _WHERE), f"{_WHERE}.ignore")
        self.by_place: dict[str, Mapping[str, Any]] = {}
        targets: list[str] = []
        self._places: list[str] = []
        groups = mapping_field(config, "config_groups", _WHERE)
        for name in groups:
            where = f"{_WHERE}.config_groups.{key_text(name)}"
            self.by_place[where] = as_mapping(groups[name], where)
            own = names_field(self.by_place[where], "targets", where)
            self._places += [where] * len(own)
            targets += own
        self._targeted = NamePatterns(targets, f"{_WHERE}.config_groups")
        self._linear = targets.index("Linear") if "Linear" in targets else None

    def of(self, module: str) -> str | None:
        """The place of the group that targets a module; None if none does."""
        if self._ignored.first_match(module) is not None:
            return None
        found = self._targeted.first_match(module)
        found = self._linear if found is None else found
        return None if found is None else self._places[found]


def _targets(kinds: Mapping[str, str], patterns: ModulePatterns) -> dict[str, list[str]]:
    """Targets by kind, a format with or without _STATIC, in the order of their groups."""
    if len(set(kinds.values())) == 1:
        return {kind: ["Linear"] for kind in kinds.values()}
    targets = patterns.of_formats(kinds)
    if _LINEAR in targets:
        del targets[_LINEAR]
        targets[_LINEAR] = ["Linear"]
    return targets


def _overall_format(formats: Collection[str]) -> str:
    stated = {_name(COMPRESSED_TENSORS[format]) for format in formats}
    if len(stated) == 1:
        return stated.pop()
    return _name(COMPRESSED_TENSORS[_LINEAR]) if _LINEAR in formats else "mixed-precision"


def _group(kind: str, targets: list[str]) -> dict[str, Any]:
    """The config group of a format, or of one with _STATIC."""
    scheme = COMPRESSED_TENSORS[kind.removesuffix(_STATIC)]
    activations = _input_activations(scheme)
    if kind.endswith(_STATIC):
        stated = _STATED_ACTIVATIONS[scheme.encoding.format.name][1]
        activations = {**stated, **_scale_dtype(scheme)}
    return {
        "targets": targets,
        "format": _name(scheme),
        "weights": _weights(scheme),
        "input_activations": activations,
        "output_activations": None,
    }


def _unreadable_config(config: Mapping[str, Any]) -> UnsupportedError | None:
    """Why weights of this checkpoint are more than codes and scales; None if they are not."""
    status = config.get("quantization_status")
    if status not in (None, "compressed"):
        return UnsupportedError(f"{_WHERE}.quantization_status is {show(status)}, not compressed")
    for field in _MUST_BE_EMPTY:
        if config.get(field):
            return UnsupportedError(f"{_WHERE}.{field} is set, which moequant does not support")
    return None


def _format_of_group(
    group: Mapping[str, Any], config: Mapping[str, Any], where: str, weights_only: bool
) -> str | UnsupportedError:
    """The format that a config group describes, or the error if it is unsupported.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    stated = group.get("format") or config.get("format")
    if not isinstance(stated, str) or stated not in _STATED:
        return UnsupportedError(
            f"{where}.format is {show(stated)}, but moequant reads only {', '.join(_STATED)}"
        )
    schemes = {
        name: scheme for name, scheme in COMPRESSED_TENSORS.items() if stated in scheme.names
    }
    differences = {
        name: _group_difference(group, scheme, where)
        for name, scheme in schemes.items()
        if not scheme.encoding.read_only
    }
    for name, difference in differences.items():
        if difference is None:
            return name
    weights = mapping_field(group, "weights", where)
    if weights_only and weights:
        by_weights = {name: _weights_difference(weights, s) for name, s in schemes.items()}
        matching = [name for name, difference in by_weights.items() if difference is None]
        if matching:
            # Those that are read-only take more widths of groups, and dtypes of scales.
            return max(matching, key=lambda name: schemes[name].encoding.read_only)
        differences = {name: f"weights{difference}" for name, difference in by_weights.items()}
    if not differences:
        return UnsupportedError(
            f"{where}.format is {show(stated)}, which moequant reads only as a source; convert it: "
            "moequant convert SOURCE OUTPUT --format NAME"
        )
    # Of a format with these weights, if there is one.
    listed = sorted(differences.items(), key=lambda item: str(item[1]).startswith("weights"))
    name, difference = listed[0]
    return UnsupportedError(
        f"{where}.{difference}, unlike {name} in moequant; use a release in a form that "
        "docs/conversion.md lists, or the unquantized one"
    )


def _block(weights: Mapping[str, Any], where: str) -> Block | None:
    """The rows and columns that share a scale; None for blocks, whose size the format fixes.

    Raises:
        CheckpointError: `group_size` is no positive whole number where there are groups, or there
            is one where there are none.
    """
    strategy, size = _argument(weights, "strategy"), weights.get("group_size")
    if strategy not in ("group", "tensor_group"):
        # compressed-tensors writes -1 for a scale a row.
        if size not in (None, 0, -1):
            raise CheckpointError(
                f"{where}.weights.group_size is {show(size)}, but strategy {show(strategy)} has no "
                "groups; correct config.json: leave group_size out, or say strategy group"
            )
        return {"tensor": (WHOLE, WHOLE), "channel": (1, WHOLE)}.get(str(strategy))
    if type(size) is not int or size < 1:
        raise CheckpointError(
            f"{where}.weights.group_size is {show(size)}, but must be a positive whole number with "
            f"strategy {strategy}; correct config.json"
        )
    return 1, size


def _stated_activations(
    group: Mapping[str, Any], config: Mapping[str, Any], where: str
) -> str | None:
    """The scheme of a group's activations if it is one of _STATED_ACTIVATIONS; else None.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    stated = group.get("format") or config.get("format")
    weights, found, outputs = (
        mapping_field(group, part, where)
        for part in ("weights", "input_activations", "output_activations")
    )
    for format, (scheme, wanted) in _STATED_ACTIVATIONS.items():
        of_weights = COMPRESSED_TENSORS[format]
        same_weights = _weights_difference(weights, of_weights) is None
        if not outputs and stated in of_weights.names and same_weights:
            return scheme if _difference(found, wanted) is None else None
    return None


def _weights_difference(weights: Mapping[str, Any], scheme: Scheme) -> str | None:
    """The first argument of a source's weights that is unlike this scheme's; None if none."""
    wanted = _weights(scheme)
    if _argument(weights, "strategy") in scheme.strategies:
        del wanted["strategy"]
    return _difference(weights, wanted)


def _group_difference(group: Mapping[str, Any], scheme: Scheme, where: str) -> str | None:
    """How a config group differs from a scheme, including activations; None if it does not."""
    parts = {
        "weights": _weights(scheme),
        "input_activations": _input_activations(scheme),
        "output_activations": None,
    }
    for part, wanted in parts.items():
        difference = _difference(mapping_field(group, part, where), wanted)
        if difference is not None:
            return f"{part}{difference}"
    return None


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> str | None:
    """The first quantization argument that differs; no arguments mean unquantized."""
    if not found or not wanted:
        return None if not found and not wanted else f" is {show(found or None)}"
    for field, value in wanted.items():
        # Older llm-compressor omits scale_dtype; the dtype of the tensor decides.
        if field != "scale_dtype" and _argument(found, field) != value:
            return f".{field} is {show(found.get(field))} and not {show(value)}"
    if found.get("actorder") not in (None, False, "weight", "static"):
        return f".actorder is {show(found['actorder'])}"
    return None


def _argument(found: Mapping[str, Any], field: str) -> object:
    """A quantization argument with compressed-tensors' defaults."""
    value = found.get(field)
    if value is None and field == "strategy":
        size = found.get("group_size")
        return "channel" if size == -1 else "group" if size else "tensor"
    if value is None:
        return _DEFAULTS.get(field)
    return value.lower() if isinstance(value, str) else value
