"""FP8 E4M3 weights with one FP32 scale per matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats.base import WHOLE
from moequant.formats.blocks import matrix_amax
from moequant.formats.elements import E4M3_FLOAT32_MAX, E4M3_MAX, encode_e4m3
from moequant.formats.fp8_block import Fp8Block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.formats.base import QuantizedWeight

_ENOUGH = 0x68
"""64 in E4M3."""


class Fp8Tensor(Fp8Block):
    """`w = qdata * scale`, one scale for the matrix, which gate and up of an expert share.

    As `Fp8Block`, its rules and error too, with the fused set as the block and without `search`.
    Engines run gate and up under the larger of their scales, and requantize the other one; where
    they share a power of two, that changes no code.

    Its activations may have one scale for all tokens instead of one each: "fp8_static", whose
    scale comes with the weights (`ExpertWeights.gate_up_input_scale`).
    """

    name = "fp8_tensor"
    summary = "FP8 E4M3, one FP32 scale per matrix, FP8 activations, static or per token"
    block = (WHOLE, WHOLE)
    shares_scale = True
    activations = "fp8_token"
    static_activations = "fp8_static"
    static_largest = E4M3_MAX
    options = {"scale": ("power_of_two", "float32")}  # noqa: RUF012

    def underflows(self, q: QuantizedWeight) -> bool:
        """As Format; also whether no code is 64 or more: the scale may be too large for it.

        Beside a code of 64, others that are lost, each below half of the smallest step of 2**-9,
        reach the 16 % of the norm that a conversion refuses only in a matrix of 10**8 weights.
        """
        # Codes of positive numbers, as signed bytes, have their order. Of negative ones alone,
        # which are below, the error is measured in vain.
        largest = int(q.qdata.view(torch.int8).max()) if q.qdata.numel() else _ENOUGH
        return super().underflows(q) or largest < _ENOUGH

    def global_scale(self, weights: Sequence[Tensor], options: Mapping[str, str]) -> Tensor:
        """As Format: the scale of the largest magnitude of all."""
        amax = torch.stack([matrix_amax(w) for w in weights]).amax(0)
        return self.scale_of(amax.clamp(max=E4M3_FLOAT32_MAX), options)

    def _quantize(
        self,
        w: Tensor,
        options: Mapping[str, str],
        global_scale: Tensor | None,
        importance: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        assert global_scale is not None
        scale = global_scale[..., None, None]
        codes = encode_e4m3(w.clamp(-E4M3_FLOAT32_MAX, E4M3_FLOAT32_MAX) / scale)
        # No scale where there is no row or no column.
        return codes, scale[..., : w.shape[-2], : w.shape[-1]]
