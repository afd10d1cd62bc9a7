"""NVFP4: E2M1 weights, one E4M3 scale per 16 columns, one FP32 scale per fused set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.formats.base import Format
from moequant.formats.blocks import (
    group_amax,
    grouped,
    matrix_amax,
    weighted_group_sum,
)
from moequant.formats.elements import (
    E2M1,
    E2M1_FLOAT32_MAX,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_SMALLEST,
    FLOAT32_TINY,
    ceil_exponent_of,
    decode_e2m1,
    divide,
    encode_e2m1,
    encode_e4m3,
    power_of_two,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GROUP = 16

# E4M3 has eight steps per octave, so these cover amax / 7.5 to amax / 3.4. A wider search gains
# nothing on N(0, 0.02); with only -1 and +1 the relative error is 8.65 % instead of 8.13 %.
SEARCH_STEPS = (-1, 1, -2, 2, 3, 4, 5, 6)

# One channel may carry nearly all of a group's weighted error: the input of a massive activation.
# Its weight is then worth a scale of its own, under which larger ones saturate: down to amax / 12.
WEIGHTED_STEPS = (*SEARCH_STEPS, -3, -4, -5, -6, -7, -8)


class Nvfp4(Format):
    """`w = qdata * scale * global_scale`; gate and up of one expert share the global scale.

    The global scale is amax / 2688 over the fused set, rounded up to a power of two so that its
    reciprocal, which some dialects store, is exact; `global_scale = "exact"` leaves it as it is
    (9.52 % against 9.51 % relative error on N(0, 0.02)). It is at least 2**-126, so that it and
    its reciprocal are normal numbers, and 1 where every weight is zero.

    A group's scale is amax / (6 * global scale) rounded to E4M3, and its codes are computed with
    that rounded scale. `search = "mse"` takes, of the E4M3 numbers from two below it to six above,
    the one of least squared error (8.13 %); of equals the one nearest the default, then the lower.
    `search = "weighted"` counts each squared error times the mean square of its input channel, and
    begins eight below.

    Rules: round to nearest, ties to the even code; beyond +-6 saturates; a zero group has scale 1
    and zero codes; a scale that underflows becomes 2**-9; a zero keeps its sign (code 8 is -0), as
    does a negative weight that rounds to zero; weights beyond +-1.5 * 2**127 saturate there, so
    that no finite weight decodes to Inf.

    Error: at most half a step of E2M1, times scale * global scale, but for two subnormal scales:
    2**-9 may clip the group's amax from 9 to 6, and 2**-8 from 7.5, in those units. `search`
    exceeds this bound to reduce the sum of squares.
    """

    name = "nvfp4"
    summary = "FP4 E2M1, one E4M3 scale per 16 columns, one FP32 scale per expert, weight only"
    block = (1, _GROUP)
    element = E2M1
    scale_dtype = torch.float8_e4m3fn
    has_global_scale = True
    activations = "none"
    static_activations = "nvfp4_static"
    static_largest = E2M1_MAX * E4M3_MAX
    ordinary_error = 0.0956
    least_scale = 2.0**-6
    options = {  # noqa: RUF012
        "global_scale": ("power_of_two", "exact"),
        "search": ("none", "mse", "weighted"),
    }
    has_gaussian_search = True

    def global_scale(self, weights: Sequence[Tensor], options: Mapping[str, str]) -> Tensor:
        """As Format."""
        amax = torch.stack([matrix_amax(w) for w in weights]).amax(0)
        scale = divide(amax, E2M1_MAX * E4M3_MAX)
        if options["global_scale"] == "power_of_two":
            scale = power_of_two(ceil_exponent_of(scale))
        return torch.where(amax == 0, 1.0, scale.clamp(min=FLOAT32_TINY))

    def _quantize(
        self,
        w: Tensor,
        options: Mapping[str, str],
        global_scale: Tensor | None,
        importance: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        assert global_scale is not None
        w = w.clamp(-E2M1_FLOAT32_MAX, E2M1_FLOAT32_MAX)
        per_group = global_scale[..., None, None]
        amax = group_amax(w, _GROUP)
        # Divide by the global scale first: amax / 6 alone may underflow in float32.
        scale = encode_e4m3(divide(amax / per_group, E2M1_MAX)).float().clamp(min=E4M3_SMALLEST)
        scale = torch.where(amax == 0, 1.0, scale)
        if options["search"] != "none":
            x = grouped(w, _GROUP) / per_group[..., None]
            scale = _least_squares(x, scale, importance)
        codes = encode_e2m1(grouped(w, _GROUP) / (scale * per_group)[..., None])
        return codes.reshape(w.shape), scale.to(self.scale_dtype)


def _least_squares(x: Tensor, scale: Tensor, importance: Tensor | None) -> Tensor:
    """For each group, the E4M3 scale near `scale` with the least squared error.

    Args:
        x: [..., N, K / 16, 16] float32, weights over their global scale, at most 2688.
        scale: [..., N, K / 16] float32 holding positive E4M3 numbers, the default scale.
        importance: [K] float32, with which smaller scales are tried, too; or None for equal ones.
    """
    code = scale.to(torch.float8_e4m3fn).view(torch.uint8).int()
    best, least = scale, _squared_error(x, scale, importance)
    for step in SEARCH_STEPS if importance is None else WEIGHTED_STEPS:
        # Positive E4M3 numbers are ordered as their bytes: 1 is 2**-9, 126 is 448, 127 is NaN.
        near = (code + step).clamp(1, 126).to(torch.uint8).view(torch.float8_e4m3fn).float()
        error = _squared_error(x, near, importance)
        better = error < least
        best, least = torch.where(better, near, best), torch.where(better, error, least)
    return best


def _squared_error(x: Tensor, scale: Tensor, importance: Tensor | None) -> Tensor:
    """Squared error of each group of `x` under `scale`: [..., N, K / 16]."""
    scale = scale[..., None]
    squares = decode_e2m1(encode_e2m1(x / scale)).mul_(scale).sub_(x).square_()
    return weighted_group_sum(squares, importance)
