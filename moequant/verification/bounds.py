"""The error bound for elements of a weight that another tool quantized.

Given the scale s of its block, an element of the weight may differ from its code * s

* by half a step of the element type at that magnitude, times s;
* or by clipping to the largest code, as far as common rules for s clip: most choose s as amax over
  the largest number of the element, or that rounded up, and clip nothing. The scale of nvfp4 is
  amax / 6 rounded to E4M3, so that weights up to 6 (s + u) are clipped, u half a unit in the last
  place of s. Other formats say in `Format.reach` how far;
* or by more clipping, if the squared error of its block is within the limit relative to our
  quantizer with default options: tools that search for scales clip where it reduces the error.

Each has an allowance of 2**-8 of the weight, because many tools compute scales and quotients in
bfloat16; each step rounds by up to 2**-9, and an element that near a tie may get either code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.formats import dequantize, get_format
from moequant.formats.blocks import expand_blocks
from moequant.formats.elements import E4M3

if TYPE_CHECKING:
    from moequant.formats import QuantizedWeight

MAX_LOST_DB = 1.5
"""How far the SQNR of a weight, or of a clipped block, may be below our quantizer's with default
options.

The limit lies between the worst rule in use and the mildest mistake, measured on [512, 1024]
normal, uniform, Laplace, Student's t (4 degrees of freedom) and normal with large columns: INT4
with scale amax / 7 loses up to 1.12 dB (amax / 7.5 0.65, MXFP4 with its scale rounded up 0.62); FP8
with FP32 scales, requantized to power-of-two scales, loses 2.6 to 3.1.
"""

_ALLOWANCE = 2.0**-8


@dataclass(frozen=True, kw_only=True)
class OutOfBound:
    """The first element beyond its bound, and how many there are.

    Attributes:
        index: row and column.
        weight: its value in the source.
        decoded: its value in the converted checkpoint.
        scale: the scale of its block, global scale included.
        count: elements beyond their bound.
    """

    index: tuple[int, ...]
    weight: float
    decoded: float
    scale: float
    count: int

    def __str__(self) -> str:
        return (
            f"element {list(self.index)} is {self.decoded:.6g} for {self.weight:.6g} with scale "
            f"{self.scale:.6g}, more than rounding or clipping explains; {self.count} such "
            "elements"
        )


def find_out_of_bound(
    w: Tensor,
    q: QuantizedWeight,
    reference: QuantizedWeight,
    max_lost_db: float = MAX_LOST_DB,
    *,
    first_row: int = 0,
    before: OutOfBound | None = None,
) -> OutOfBound | None:
    """The first element of `q` that differs from `w` by more than rounding and clipping explain.

    A large weight may be given some rows at a time, from the first to the last.

    Args:
        w: [N, K] float32, the source.
        q: the weight as quantized by another tool.
        reference: the weight as quantized by our quantizer with default options.
        max_lost_db: how far the SQNR of a clipped block may be below the reference's.
        first_row: index of the first of these rows in the weight.
        before: what was found in the rows before them.

    Raises:
        UnsupportedError: there is no such format.
    """
    format = get_format(q.format)
    element, block = format.element, format.block_of(q)
    codes = element.lowest, element.largest

    def spread(blocks: Tensor) -> Tensor:
        return expand_blocks(blocks, block, q.shape)

    decoded, scale = dequantize(q), spread(_block_scale(q))
    error, magnitude = (w - decoded).abs(), w.abs()
    allowance = _ALLOWANCE * magnitude
    # With a zero scale there is only the code 0, and no quotient.
    in_steps = torch.where(scale > 0, magnitude / scale, 0.0)
    end = _toward(w, codes) * scale
    # Negated, because comparisons with NaN are false and NaN must be out of bound.
    nearest = error <= element.half_step(in_steps) * scale + allowance
    bad = ~(nearest & (magnitude <= end + allowance))
    if bad.any():
        clipped = error <= magnitude - end + allowance
        reach = _toward(w, format.reach or codes) * spread(_block_scale(q, unrounded=True))
        meant = magnitude <= reach + allowance
        bad &= ~(clipped & meant)
    if bad.any():
        budget = 10 ** (max_lost_db / 10) * _block_error(w, dequantize(reference), block)
        bad &= ~(clipped & spread(_block_error(w, decoded, block) <= budget))
    if not bad.any():
        return before
    count = int(bad.sum())
    if before is not None:
        return replace(before, count=before.count + count)
    row, column = bad.nonzero()[0].tolist()
    return OutOfBound(
        index=(first_row + row, column),
        weight=w[row, column].item(),
        decoded=decoded[row, column].item(),
        scale=scale[row, column].item(),
        count=count,
    )


def _toward(w: Tensor, ends: tuple[float, float]) -> Tensor:
    """Magnitude of the end of a range that has the sign of each weight."""
    lowest, highest = ends
    return torch.where(w < 0, -lowest, highest)


def _block_scale(q: QuantizedWeight, *, unrounded: bool = False) -> Tensor:
    """Scale of each block, global scale included, float32.

    With `unrounded`, the largest that an E4M3 scale may have been rounded from; formats with other
    scales of few bits say in `reach` what rounding does.
    """
    scale = q.scale.float()
    if unrounded and q.scale.dtype == E4M3.dtype:
        scale = scale + E4M3.half_step(scale)
    return scale if q.global_scale is None else scale * q.global_scale


def _block_error(w: Tensor, decoded: Tensor, block: tuple[int, int]) -> Tensor:
    """Squared error of each block, float64: [N, K] to [ceil(N / bn), ceil(K / bk)]."""
    (N, K), (block_n, block_k) = w.shape, block
    square = (w.double() - decoded).square()
    padded = torch.nn.functional.pad(square, (0, -K % block_k, 0, -N % block_n))
    tiles = padded.reshape(padded.shape[0] // block_n, block_n, padded.shape[1] // block_k, block_k)
    return tiles.sum((1, 3))
