"""FP8 E4M3 weights with one FP32 scale per output row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.formats.base import WHOLE, Format, QuantizedWeight
from moequant.formats.blocks import block_amax
from moequant.formats.elements import (
    E4M3,
    E4M3_FLOAT32_MAX,
    E4M3_MAX,
    FLOAT32_TINY,
    ceil_exponent_of,
    divide,
    encode_e4m3,
    power_of_two,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class Fp8Channel(Format):
    """`w = qdata * scale`, as in compressed-tensors' FP8_DYNAMIC.

    The scale is amax / 448 of the row, rounded up to a power of two, which dequantizes without a
    rounding; option `scale = "float32"` leaves it as it is, as other tools do.

    Rules: round to nearest even after clamping to +-448; -0 stays -0; a zero row has scale 1; a
    scale is at least 2**-126, a normal number; weights beyond +-1.875 * 2**127 saturate there, so
    that no finite weight decodes to Inf.

    Error: at most half a step of E4M3, times scale.
    """

    name = "fp8_channel"
    summary = "FP8 E4M3, one FP32 scale per row, FP8 activations per token"
    block = (1, WHOLE)
    ragged = True
    element = E4M3
    scale_dtype = torch.float32
    activations = "fp8_token"
    ordinary_error = 0.0268
    least_scale = 2 * FLOAT32_TINY
    options = {"scale": ("power_of_two", "float32")}  # noqa: RUF012

    def _quantize(
        self, w: Tensor, options: Mapping[str, str], global_scale: Tensor | None
    ) -> QuantizedWeight:
        w = w.clamp(-E4M3_FLOAT32_MAX, E4M3_FLOAT32_MAX)
        N, K = w.shape[-2:]
        amax = block_amax(w, (min(self.block[0], max(N, 1)), max(K, 1)))
        scale = divide(amax, E4M3_MAX)
        if options.get("scale") == "power_of_two":
            scale = power_of_two(ceil_exponent_of(scale))
        scale = torch.where(amax == 0, 1.0, scale.clamp(min=FLOAT32_TINY))
        return QuantizedWeight(
            format=self.name,
            qdata=encode_e4m3(w / scale),
            scale=scale,
            global_scale=None,
            shape=w.shape,
        )
