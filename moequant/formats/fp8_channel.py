"""FP8 E4M3 weights with one FP32 scale per output row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.formats.base import WHOLE, Format, QuantizedWeight
from moequant.formats.elements import E4M3, E4M3_MAX, FLOAT32_TINY, divide, encode_e4m3

if TYPE_CHECKING:
    from collections.abc import Mapping


class Fp8Channel(Format):
    """`w = qdata * scale`, as in compressed-tensors' FP8_DYNAMIC.

    The scale is amax / 448 of the row, and 1 where all is zero; codes round to nearest even.
    """

    name = "fp8_channel"
    summary = "FP8 E4M3, one FP32 scale per row, FP8 activations per token"
    uses = frozenset({"read", "run"})
    block = (1, WHOLE)
    ragged = True
    element = E4M3
    scale_dtype = torch.float32
    activations = "fp8_token"

    def _quantize(
        self, w: Tensor, options: Mapping[str, str], global_scale: Tensor | None
    ) -> QuantizedWeight:
        axes = (-1,) if self.block[0] == 1 else (-2, -1)
        amax = w.abs().amax(axes, keepdim=True)
        scale = torch.where(amax == 0, 1.0, divide(amax, E4M3_MAX).clamp(min=FLOAT32_TINY))
        return QuantizedWeight(
            format=self.name,
            qdata=encode_e4m3(w / scale),
            scale=scale,
            global_scale=None,
            shape=w.shape,
        )
