"""FP8 blocks as in the releases of DeepSeek-V3 and Qwen3, for vLLM, SGLang and transformers.

`weight` is E4M3 and `weight_scale_inv` FP32, a multiplier despite its name. Other formats, by
`weight_block_size` as in FP8 of schemes.py, are read-only.

Decisions, each with the failure it prevents:

* `modules_to_not_convert` has the full name of every kept module, because vLLM compares whole names
  and would build an FP8 layer around a BF16 weight.
* Beside kept projections to the latent space of MLA, the list has the layer into which SGLang
  merges them. Its class for glm4_moe_lite finds it only by that name; of other merged layers it
  knows the parts in this dialect.
* A kept block of experts is listed as `model.layers.3.mlp.experts`, not expert by expert, because
  transformers looks up the block, which longer names do not match.
* No `scale_fmt`, although the scales are powers of two: it says how scales are *stored*. With it,
  transformers 5.24 would create E8M0 parameters for FP32 tensors, and SGLang 0.5.23 would also
  round the activation scales of linear layers. Without it both read FP32. The dialect fp8-ue8m0 is
  the one with it.

Sources: vLLM 0.33 `quantization/fp8.py`, SGLang 0.5.23 `quantization/fp8.py`, transformers 5.24
`integrations/finegrained_fp8.py` and `quantizers/quantizers_utils.py`.
"""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect
from moequant.dialects.config_fields import QUANTIZATION_CONFIG as _WHERE
from moequant.dialects.engine_names import LATENT, merged_in_sglang, with_merged_layers
from moequant.dialects.names import KeptModules, format_by_role
from moequant.dialects.schemes import FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_FORMAT = "fp8_block"

# Fields that determine the tensors' format, and their supported values; None if optional.
_WEIGHTS: dict[str, tuple[object, ...]] = {
    "weight_block_size": ([128, 128],),
    # MiniMax-M2 was released with torch's name of the dtype.
    "fmt": (None, "float8_e4m3fn", "e4m3"),
    "expert_dtype": (None, "fp8"),
    "store_dtype": (None,),
    "moe_quant_algo": (None,),
    "routed_experts_quant_method": (None,),
}
_ACTIVATIONS: dict[str, tuple[object, ...]] = {"activation_scheme": ("dynamic",)}

EXPERTS_IN_MXFP4 = {"expert_dtype": "fp4", "routed_experts_quant_method": "mxfp4"}
"""The fields that say of routed experts that they are in MXFP4, any of which is enough."""


class Fp8(Dialect):
    """`quant_method: fp8` with `weight_block_size`; the module's docstring has the reasons."""

    name = "fp8"
    summary = "vLLM, SGLang and transformers; how DeepSeek-V3 and Qwen3 FP8 were released"
    methods = ("fp8",)
    schemes = FP8

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        latent = [name for name in others if name.rpartition(".")[2] in LATENT]
        merged = with_merged_layers(latent, formats, merged_in_sglang)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": sorted({*blocks, *others, *merged}),
        }

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """As Dialect; what says E8M0 or MXFP4 is of the dialect fp8-ue8m0."""
        return super().claims(quantization_config) and not needs_e8m0(quantization_config)

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        """As Dialect.

        A module is kept if `modules_to_not_convert` or `ignored_layers` has its full name, the
        name of a parent module, the end of its name after a dot, or a regular expression for one of
        the first two. That is what transformers does; vLLM compares only full names.

        With `weights_only`, `weight_block_size` says the format.
        """
        format = _FORMAT
        if weights_only:
            size = config.get("weight_block_size")
            format = next((name for name, s in FP8.items() if size in s.names), _FORMAT)
        return reader_of(config, experts=format, others=format, weights_only=weights_only)


def says_mxfp4(quantization_config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` says that routed experts are in MXFP4."""
    return any(quantization_config.get(f) == value for f, value in EXPERTS_IN_MXFP4.items())


def needs_e8m0(quantization_config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of the dialect fp8-ue8m0 rather than of fp8."""
    return quantization_config.get("scale_fmt") == "ue8m0" or says_mxfp4(quantization_config)


def reader_of(
    config: Mapping[str, Any], *, experts: str, others: str = _FORMAT, weights_only: bool
) -> Callable[[str], str | None]:
    """As `Dialect.reader`, for a config with these formats of routed experts and other modules."""
    readable = _WEIGHTS | {"weight_block_size": FP8[others].names}
    if experts not in FP8:
        readable |= {field: (*readable[field], value) for field, value in EXPERTS_IN_MXFP4.items()}
    if not weights_only:
        readable |= _ACTIVATIONS
    kept = KeptModules(config, "modules_to_not_convert", "ignored_layers")
    problem = _unreadable_field(config, readable)
    return format_by_role(kept, experts=experts, others=others, problem=problem)


def _unreadable_field(
    config: Mapping[str, Any], readable: Mapping[str, tuple[object, ...]]
) -> str | None:
    """Why the tensors that `config` describes are not supported; None if they are."""
    for field, values in readable.items():
        if config.get(field) not in values:
            return (
                f"{_WHERE}.{field} is {show(config.get(field))}, but moequant reads FP8 only with "
                f"{field} = {values[-1]!r}"
            )
    return None
