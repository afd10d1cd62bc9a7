"""FP8 E4M3 weights with one FP32 scale per 128x128 block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.formats.base import Format
from moequant.formats.blocks import block_amax, expand_blocks, group_sum
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
    from collections.abc import Mapping, Sequence

SEARCH_FACTORS = {"power_of_two": (1.0, 0.5), "float32": (1.0, 15 / 16, 14 / 16)}
"""By option `scale`. 1 first: a tie keeps it. E4M3 has the same relative steps under any scale, so
a smaller one only gives weights near zero finer steps; 12/16 or a quarter gain less than 0.1 %."""


class Fp8Block(Format):
    """`w = qdata * scale`; the scale is amax / 448 of the block, rounded up to a power of two.

    Power-of-two scales cost almost no accuracy on BF16 weights (2.66 % against 2.65 % relative
    error), and make the requantization in DeepGEMM's loaders for Hopper and Blackwell a no-op. With
    option `scale = "float32"` that requantization raises the error to 3.72 %.

    Rules: round to nearest even after clamping to +-448; -0 stays -0; a zero block has scale 1; a
    scale is at least 2**-126, a normal number; weights beyond +-1.875 * 2**127 saturate there, so
    that no finite weight decodes to Inf. Last blocks may be ragged.

    `search = "weighted"` multiplies the scale by the factor of SEARCH_FACTORS with the least
    squared error, each error counted by the mean square of its input channel, and so may clip.

    Error: at most half a step of E4M3, times scale; `search` exceeds this bound.
    """

    name = "fp8_block"
    summary = "FP8 E4M3, one FP32 scale per 128x128 block, FP8 activations"
    block = (128, 128)
    ragged = True
    element = E4M3
    scale_dtype = torch.float32
    activations = "fp8_group128"
    ordinary_error = 0.0268
    least_scale = 2 * FLOAT32_TINY
    options = {  # noqa: RUF012
        "scale": ("power_of_two", "float32"),
        "search": ("none", "weighted"),
    }

    def _quantize(
        self,
        w: Tensor,
        options: Mapping[str, str],
        global_scale: Tensor | None,
        importance: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        w = w.clamp(-E4M3_FLOAT32_MAX, E4M3_FLOAT32_MAX)
        N, K = w.shape[-2:]
        block = min(self.block[0], max(N, 1)), min(self.block[1], max(K, 1))
        scale = self.scale_of(block_amax(w, block), options)
        if importance is not None:
            factors = SEARCH_FACTORS[options["scale"]]
            scale = _least_squares(w, scale, importance, block=block, factors=factors)
        return encode_e4m3(w / expand_blocks(scale, block, w.shape)), scale

    @staticmethod
    def scale_of(amax: Tensor, options: Mapping[str, str]) -> Tensor:
        """The scale of weights with this largest magnitude, float32 of any shape."""
        scale = divide(amax, E4M3_MAX)
        if options.get("scale") == "power_of_two":
            scale = power_of_two(ceil_exponent_of(scale))
        return torch.where(amax == 0, 1.0, scale.clamp(min=FLOAT32_TINY))


def _least_squares(
    w: Tensor,
    scale: Tensor,
    importance: Tensor,
    *,
    block: tuple[int, int],
    factors: Sequence[float],
) -> Tensor:
    """For each block, the scale times the factor with the least weighted squared error.

    Args:
        w: [..., N, K] float32.
        scale: [..., ceil(N / block_n), ceil(K / block_k)] float32.
        importance: [K] float32.
        block: rows and columns of a block.
        factors: of the scale; the first is 1.
    """
    x = w / expand_blocks(scale, block, w.shape)
    best, least = scale, _squared_error(x, importance, block, factors[0])
    for factor in factors[1:]:
        error = _squared_error(x, importance, block, factor)
        smaller = scale * factor
        better = (error < least) & (smaller >= FLOAT32_TINY)
        best, least = torch.where(better, smaller, best), torch.where(better, error, least)
    return best


def _squared_error(x: Tensor, importance: Tensor, block: tuple[int, int], factor: float) -> Tensor:
    """Weighted squared error of each block of `x`, which is in units of its scale, at `factor`.

    The order of additions is fixed: down the rows of a column, then the columns by `group_sum`.
    """
    squares = (encode_e4m3(x / factor).float() * factor - x).square_()
    *lead, N, K = x.shape
    rows, columns = -(-N // block[0]), -(-K // block[1])
    pad = (0, columns * block[1] - K, 0, rows * block[0] - N)
    squares = torch.nn.functional.pad(squares, pad).reshape(
        *lead, rows, block[0], columns * block[1]
    )
    total = torch.zeros_like(squares[..., 0, :])
    for row in range(block[0]):
        total += squares[..., row, :]
    total = total * torch.nn.functional.pad(importance, pad[:2])
    # Of blocks narrower than a power of two.
    total = total.reshape(*lead, rows, columns, block[1])
    width = 1 << (block[1] - 1).bit_length()
    return group_sum(torch.nn.functional.pad(total, (0, width - block[1])))
