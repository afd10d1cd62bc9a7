"""The dialect of llm-compressor, for vLLM, and in part for SGLang and transformers.

Decisions, each with the failure it prevents:

* Every group states its `format`. Otherwise compressed-tensors assumes `int-quantized`, unpacked
  codes, for INT4 weights with FP8 activations.
* A single format targets `Linear`. SGLang 0.5.23 looks up the scheme of W4A8 experts by that word.
* `ignore` has the full name of every kept module. Otherwise SGLang raises for a linear layer that
  is neither ignored nor targeted, and transformers expects scales that do not exist.
* A kept block of experts is ignored by a regex, because SGLang looks up `experts.0.gate_proj` even
  for Mixtral, whose files have `w1`.
* A regex leaves the prefix of a name open, because vLLM renames modules of vision models in plain
  names but not in regexes.

Several formats in a checkpoint have one group each, which targets all children of a parent by a
regex, because SGLang also looks up fused names such as `qkv_proj`. Only `w4a8` keeps `Linear` and
sets the top-level `format`, because SGLang accepts nothing else. Its group comes last: transformers
5.23 has one scheme for all experts, that of the first group with a regex containing `experts`, and
one for all other modules, that of the first group without. So transformers cannot load routed
experts in two formats; vLLM and SGLang can.

Sources: compressed-tensors 0.20 `quantization/quant_scheme.py` (presets W4AFP8, NVFP4A16,
MXFP4A16, FP8_BLOCK) and `utils/match.py`; vLLM 0.33 and SGLang 0.5.23
`quantization/compressed_tensors/`; transformers 5.23 `integrations/compressed_tensors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect
from moequant.dialects.config_fields import as_mapping, key_text, mapping_field, names_field
from moequant.dialects.encodings import (
    E8m0Groups,
    Encoding,
    Fp8Blocks,
    Fp8Channels,
    Int4Groups,
    Int4Packed,
    Nvfp4Packed,
)
from moequant.dialects.names import ModulePatterns, NamePatterns, kept_blocks
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    _ReadGroup = Callable[[Mapping[str, Any], Mapping[str, Any], str], str | UnsupportedError]

_WHERE = "quantization_config"


@dataclass(frozen=True, kw_only=True)
class _Scheme:
    """One format as compressed-tensors describes it."""

    encoding: Encoding
    format: str
    """The library's name of the encoding."""
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None = None
    strategies: tuple[str, ...] = ()
    """Strategies of weights beside the one in `weights` with which sources are read too."""

    def difference(self, weights: Mapping[str, Any]) -> str | None:
        """The first argument of a source's weights that is unlike this scheme's; None if none."""
        wanted = dict(self.weights)
        if _argument(weights, "strategy") in self.strategies:
            del wanted["strategy"]
        return _difference(weights, wanted)


_SCHEMES = {
    "fp8_block": _Scheme(
        encoding=Fp8Blocks(scale="weight_scale"),
        format="float-quantized",
        weights={
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [128, 128],
            "symmetric": True,
            "dynamic": False,
        },
        input_activations={
            "num_bits": 8,
            "type": "float",
            "strategy": "group",
            "group_size": 128,
            "symmetric": True,
            "dynamic": True,
        },
    ),
    "nvfp4": _Scheme(
        encoding=Nvfp4Packed(),
        format="nvfp4-pack-quantized",
        weights={
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
    "mxfp4": _Scheme(
        encoding=E8m0Groups("mxfp4", codes="weight_packed"),
        format="mxfp4-pack-quantized",
        weights={
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        },
    ),
    "w4a8": _Scheme(
        encoding=Int4Packed(),
        format="pack-quantized",
        weights={
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": 128,
            "symmetric": True,
            "dynamic": False,
        },
        input_activations={
            "num_bits": 8,
            "type": "float",
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        },
    ),
    "fp8_channel": _Scheme(
        encoding=Fp8Channels("weight_scale", read_only=False),
        format="float-quantized",
        weights={
            "num_bits": 8,
            "type": "float",
            "strategy": "channel",
            "symmetric": True,
            "dynamic": False,
        },
        input_activations={
            "num_bits": 8,
            "type": "float",
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        },
        strategies=("tensor",),
    ),
    "mxfp8": _Scheme(
        encoding=E8m0Groups("mxfp8", codes="weight"),
        format="mxfp8-quantized",
        weights={
            "num_bits": 8,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        },
    ),
    "int4": _Scheme(
        encoding=Int4Groups(),
        format="pack-quantized",
        weights={
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "symmetric": True,
            "dynamic": False,
        },
        strategies=("channel",),
    ),
}

# In a mixed checkpoint, the format that targets `Linear` and sets the top-level `format`.
_LINEAR = "w4a8"

_STATED = list(dict.fromkeys(scheme.format for scheme in _SCHEMES.values()))

# Defaults of missing fields; a missing `strategy` follows from the group size.
_DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}

# If one of these fields is not empty, a weight is more than its codes and scales.
_MUST_BE_EMPTY = ("transform_config", "sparsity_config", "linear_fp8_config")


class CompressedTensors(Dialect):
    """`quant_method: compressed-tensors`; the module's docstring has the reasons."""

    name = "compressed-tensors"
    summary = "vLLM, and in part SGLang and transformers; what llm-compressor writes"
    encodings = {name: scheme.encoding for name, scheme in _SCHEMES.items()}  # noqa: RUF012

    def quantization_config(
        self, formats: Mapping[str, str], kept: Iterable[str]
    ) -> dict[str, Any]:
        """As Dialect."""
        for module, format in formats.items():
            self._encoding(module, format)
        blocks, others = kept_blocks(kept)
        patterns = ModulePatterns.among((*formats, *blocks, *others))
        targets = _targets(formats, patterns)
        return {
            "quant_method": "compressed-tensors",
            "format": _overall_format(targets),
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{i}": _group(_SCHEMES[format], targets[format])
                for i, format in enumerate(targets)
            },
            "ignore": [*others, *map(patterns.of_block, blocks)],
            "kv_cache_scheme": None,
        }

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """As Dialect."""
        method = quantization_config.get("quant_method")
        return method in ("compressed-tensors", "compressed_tensors")

    def reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect.

        As vLLM matches: `ignore` first, then the first target with the module's name or a regex
        for it, then a group that targets `Linear`.
        """
        return self._reader(quantization_config, _format_of_group)

    def source_reader(self, quantization_config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """As Dialect; compares only the weights of schemes."""
        return self._reader(quantization_config, _source_format_of_group)

    def _reader(
        self, quantization_config: Mapping[str, Any], read_group: _ReadGroup
    ) -> Callable[[str], str | None]:
        config = as_mapping(quantization_config, _WHERE)
        problem = _unreadable_config(config)
        ignored = NamePatterns(names_field(config, "ignore", _WHERE), f"{_WHERE}.ignore")
        groups = _read_groups(config, read_group)
        targets = [target for target, _ in groups]
        targeted = NamePatterns(targets, f"{_WHERE}.config_groups")
        linear = targets.index("Linear") if "Linear" in targets else None

        def format_of(module: str) -> str | None:
            if ignored.first_match(module) is not None:
                return None
            found = targeted.first_match(module)
            found = linear if found is None else found
            if found is None:
                return None
            scheme = problem or groups[found][1]
            if isinstance(scheme, UnsupportedError):
                raise UnsupportedError(f"{module}: {scheme}")
            return scheme

        return format_of


def _targets(formats: Mapping[str, str], patterns: ModulePatterns) -> dict[str, list[str]]:
    """Targets by format, in the order of their groups."""
    if len(set(formats.values())) == 1:
        return {format: ["Linear"] for format in formats.values()}
    targets = patterns.of_formats(formats)
    if _LINEAR in targets:
        del targets[_LINEAR]
        targets[_LINEAR] = ["Linear"]
    return targets


def _overall_format(formats: Iterable[str]) -> str:
    stated = {_SCHEMES[format].format for format in formats}
    if len(stated) == 1:
        return stated.pop()
    return _SCHEMES[_LINEAR].format if _LINEAR in formats else "mixed-precision"


def _group(scheme: _Scheme, targets: list[str]) -> dict[str, Any]:
    activations = scheme.input_activations
    return {
        "targets": targets,
        "format": scheme.format,
        "weights": dict(scheme.weights),
        "input_activations": None if activations is None else dict(activations),
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


def _read_groups(
    config: Mapping[str, Any], read_group: _ReadGroup
) -> list[tuple[str, str | UnsupportedError]]:
    """Every target of every config group, with its format, or the error if it is unsupported.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    groups = mapping_field(config, "config_groups", _WHERE)
    found: list[tuple[str, str | UnsupportedError]] = []
    for name in groups:
        where = f"{_WHERE}.config_groups.{key_text(name)}"
        group = as_mapping(groups[name], where)
        format = read_group(group, config, where)
        found += [(target, format) for target in names_field(group, "targets", where)]
    return found


def _format_of_group(
    group: Mapping[str, Any], config: Mapping[str, Any], where: str
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
    differences = {}
    for format, scheme in _SCHEMES.items():
        if scheme.format == stated and not scheme.encoding.read_only:
            differences[format] = _group_difference(group, scheme, where)
            if differences[format] is None:
                return format
    format, difference = next(iter(differences.items()))
    return UnsupportedError(f"{where}.{difference}, unlike {format} in moequant")


def _group_difference(group: Mapping[str, Any], scheme: _Scheme, where: str) -> str | None:
    """How a config group differs from a scheme, including activations; None if it does not."""
    parts = {
        "weights": scheme.weights,
        "input_activations": scheme.input_activations,
        "output_activations": None,
    }
    for part, wanted in parts.items():
        difference = _difference(mapping_field(group, part, where), wanted)
        if difference is not None:
            return f"{part}{difference}"
    return None


def _source_format_of_group(
    group: Mapping[str, Any], config: Mapping[str, Any], where: str
) -> str | UnsupportedError:
    """As `_format_of_group`, but ignores activations.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    ours = _format_of_group(group, config, where)
    stated = group.get("format") or config.get("format")
    weights = mapping_field(group, "weights", where)
    if not isinstance(ours, UnsupportedError) or not weights or not isinstance(stated, str):
        return ours
    found = [name for name, scheme in _SCHEMES.items() if scheme.format == stated]
    # Those that are read-only take more widths of groups, and dtypes of scales.
    for format in sorted(found, key=lambda name: not _SCHEMES[name].encoding.read_only):
        if _SCHEMES[format].difference(weights) is None:
            return format
    if not found:
        return ours
    difference = _SCHEMES[found[0]].difference(weights)
    return UnsupportedError(f"{where}.weights{difference}, unlike {found[0]} in moequant")


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> str | None:
    """The first quantization argument that differs; no arguments mean unquantized."""
    if not found or not wanted:
        return None if not found and not wanted else f" is {show(found or None)}"
    for field, value in wanted.items():
        # Older llm-compressor omits scale_dtype; the dtype of the tensor decides.
        if field != "scale_dtype" and _argument(found, field) != value:
            return f".{field} is {show(found.get(field))}"
    if found.get("actorder") not in (None, False, "weight", "static"):
        return f".actorder is {show(found['actorder'])}"
    return None


def _argument(found: Mapping[str, Any], field: str) -> object:
    """A quantization argument with compressed-tensors' defaults."""
    value = found.get(field)
    if value is None and field == "strategy":
        return "group" if found.get("group_size") else "tensor"
    if value is None:
        return _DEFAULTS.get(field)
    return value.lower() if isinstance(value, str) else value
