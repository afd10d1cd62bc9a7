"""FP8 E4M3 weights with one FP32 scale per matrix."""

from __future__ import annotations

from moequant.formats.base import WHOLE
from moequant.formats.elements import E4M3_MAX
from moequant.formats.fp8_block import Fp8Block


class Fp8Tensor(Fp8Block):
    """`w = qdata * scale`, the scale amax / 448 of the whole matrix.

    Its activations may have one scale for all tokens instead of one each: "fp8_static", whose
    scale comes with the weights (`ExpertWeights.gate_up_input_scale`).
    """

    name = "fp8_tensor"
    summary = "FP8 E4M3, one FP32 scale per matrix, FP8 activations per token"
    uses = frozenset({"run"})
    options = {}  # noqa: RUF012
    block = (WHOLE, WHOLE)
    activations = "fp8_token"
    static_activations = "fp8_static"
    static_largest = E4M3_MAX
