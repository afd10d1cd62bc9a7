"""INT4 experts among FP8 layers, as SGLang's `w4afp8` reads them and DeepSeek-R1-W4AFP8 has them.

Codes of routed experts are `weight` I8 [N, K/2], two's complement, and `weight_scale_inv` is FP32
[N, K/128]. All other linear layers are FP8 blocks, as in the dialect fp8.

SGLang reads nothing of config.json but `quant_method`. It takes the experts of every layer for
INT4 and every other linear layer for FP8 blocks, so both have to be. `group_size`,
`weight_block_size` and `modules_to_not_convert`, which has routers, embeddings and the head, are
for other readers.

It quantizes the inputs of experts with one static scale for all experts of a layer, the largest
`input_scale`, and with 1 where there is none. None is written.

DeepSeek-R1-W4AFP8, by a script of TensorRT-LLM, has no `quantization_config`:
hf_quant_config.json says MIXED_PRECISION without layers, and quant_cfg.json has these. Its
`input_scale` stand under `w1`, `w2` and `w3` of each expert, its codes and scales under `gate_proj`
and so on.

Sources: SGLang 0.5.23 `quantization/w4afp8.py`, `configs/model_config.py` and
`models/deepseek_common/deepseek_weight_loader.py`; NVIDIA/TensorRT-LLM 2376c67c,
`examples/quantization/quantize_mixed_precision_moe.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.dialects.base import Dialect
from moequant.dialects.names import KeptModules, format_by_role, is_expert
from moequant.dialects.schemes import W4AFP8
from moequant.errors import UnsupportedError
from moequant.storage.files import QUANT_CFG_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_EXPERTS, _OTHERS = "w4a8", "fp8_block"
_METHOD = "w4afp8"
_OF_TENSORRT = "W4A8_AWQ"
"""What quant_cfg.json calls experts in INT4."""


class W4aFp8(Dialect):
    """`quant_method: w4afp8`; the module's docstring has the reasons."""

    name = "w4afp8"
    summary = "SGLang; whole models, INT4 experts and FP8 blocks, as DeepSeek-R1-W4AFP8"
    methods = (_METHOD,)
    schemes = W4AFP8
    quantizes_all = True

    def check(
        self, module: str, format: str, shape: Sequence[int], *, rows_follow: bool = False
    ) -> None:
        """As Dialect; experts are INT4 and other layers FP8 blocks."""
        super().check(module, format, shape, rows_follow=rows_follow)
        wanted = _EXPERTS if is_expert(module) else _OTHERS
        if format in self.encodings and format != wanted:
            raise UnsupportedError(
                f"{module}: in the dialect {self.name} it must be {wanted}, not {format}: routed "
                f"experts are {_EXPERTS}, and all other linear layers {_OTHERS}; give it that in a "
                "recipe, or choose the dialect compressed-tensors"
            )

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        return {
            "quant_method": _METHOD,
            "group_size": self.encodings[_EXPERTS].format.block[1],
            "weight_block_size": list(self.encodings[_OTHERS].format.block),
            "modules_to_not_convert": sorted(blocks + others),
        }

    def complete(
        self,
        quantization_config: Mapping[str, Any] | None,
        config: Mapping[str, Any],
        read: Callable[[str], Mapping[str, Any] | None],
    ) -> Mapping[str, Any] | None:
        """As Dialect; quant_cfg.json says that a mixture without layers is this one."""
        found = quantization_config
        if found is None or found.get("quant_algo") != "MIXED_PRECISION":
            return found
        document = None if found.get("quantized_layers") else read(QUANT_CFG_FILE)
        layers = None if document is None else document.get("quantized_layers")
        if not isinstance(layers, dict):
            return found
        algorithms = [e.get("quant_algo") for e in layers.values() if isinstance(e, dict)]
        return {"quant_method": _METHOD} if _OF_TENSORRT in algorithms else found

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        """As Dialect; `modules_to_not_convert` is matched as in the dialect fp8."""
        kept = KeptModules(config, "modules_to_not_convert")
        return format_by_role(kept, experts=_EXPERTS, others=_OTHERS)
