"""FP8 E4M3 weights with one FP32 scale per output row."""

from __future__ import annotations

from moequant.formats.base import WHOLE
from moequant.formats.fp8_block import Fp8Block


class Fp8Channel(Fp8Block):
    """`w = qdata * scale`, as in compressed-tensors' FP8_DYNAMIC.

    As `Fp8Block`, its rules and error too, with a row as the block and without `search`. A
    power-of-two scale dequantizes without a rounding; other tools leave amax / 448 as it is.
    """

    name = "fp8_channel"
    summary = "FP8 E4M3, one FP32 scale per row, FP8 activations per token"
    block = (1, WHOLE)
    activations = "fp8_token"
    options = {"scale": ("power_of_two", "float32")}  # noqa: RUF012
