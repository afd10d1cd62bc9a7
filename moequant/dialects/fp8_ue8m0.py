"""FP8 blocks with E8M0 scales, and MXFP4 experts as SGLang takes them for any model.

As the dialect fp8, with scales in E8M0, one byte each, and `scale_fmt: ue8m0`, which says so.
Routed experts may be in MXFP4: `weight` I8 [N, K/2], `weight_scale_inv` E8M0 [N, K/32]. DeepSeek-V4
has these tensors under other names, Ling under these. DeepSeek-V3.1 has the same config with scales
in FP32, which are read, too.

Decisions, each with the failure it prevents:

* `routed_experts_quant_method: mxfp4` for SGLang, `expert_dtype: fp4` for transformers: neither
  looks for the other's word, and both take experts for FP8 without their own.
* Codes are I8 and not U8: transformers 5.24 unpacks two codes only from I8.
* Scales are E8M0 and not bytes: SGLang 0.5.23 copies them into FP32 parameters, where the byte of
  1 would become 127.
* `weight_block_size` also where nothing is in FP8 blocks: SGLang creates the scales of MXFP4
  experts by its method for FP8 blocks.

vLLM 0.33 loads the FP8 blocks. It takes MXFP4 experts only of the models that it knows to be
released so, by a rule of each model.

Sources: SGLang 0.5.23 `configs/model_config.py`, `quantization/fp8.py` and `mxfp4_*_moe.py`; vLLM
0.33 `quantization/fp8.py` and `models/bailing_moe_v3.py`; transformers 5.24
`integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.dialects.fp8 import EXPERTS_IN_MXFP4, Fp8, needs_e8m0, reader_of, says_mxfp4
from moequant.dialects.names import is_expert
from moequant.dialects.schemes import FP8_UE8M0
from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


class Fp8Ue8m0(Fp8):
    """`quant_method: fp8` with `scale_fmt: ue8m0`; the module's docstring has the reasons."""

    name = "fp8-ue8m0"
    summary = "SGLang and transformers, MXFP4 experts of any model; FP8 blocks with E8M0 scales"
    schemes = FP8_UE8M0

    def check(
        self, module: str, format: str, shape: Sequence[int], *, rows_follow: bool = False
    ) -> None:
        """As Dialect; MXFP4 is for routed experts only."""
        super().check(module, format, shape, rows_follow=rows_follow)
        if format == "mxfp4" and not is_expert(module):
            raise UnsupportedError(
                f"{module}: the dialect {self.name} holds mxfp4 only for routed experts; give this "
                "module fp8_block, or keep it in its source dtype, or choose compressed-tensors"
            )

    def _config(
        self,
        formats: Mapping[str, str],
        blocks: list[str],
        others: list[str],
        static: Collection[str],
    ) -> dict[str, Any]:
        experts = {format for module, format in formats.items() if is_expert(module)}
        if len(experts) > 1:
            raise UnsupportedError(
                f"routed experts in {' and '.join(sorted(experts))}, but the dialect {self.name} "
                "says one format for all; choose one, or the dialect compressed-tensors"
            )
        return {
            **super()._config(formats, blocks, others, static),
            "scale_fmt": "ue8m0",
            **(EXPERTS_IN_MXFP4 if "mxfp4" in experts else {}),
        }

    def claims(self, quantization_config: Mapping[str, Any]) -> bool:
        """As Dialect."""
        return self.describes(quantization_config) and needs_e8m0(quantization_config)

    def _reader(self, config: Mapping[str, Any], weights_only: bool) -> Callable[[str], str | None]:
        """As the dialect fp8, but routed experts are in MXFP4 where one of two fields says so."""
        experts = "mxfp4" if says_mxfp4(config) else "fp8_block"
        return reader_of(config, experts=experts, weights_only=weights_only)
