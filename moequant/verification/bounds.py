"""Whether codes are the nearest ones: the bound for a weight that another tool quantized.

Given the scale s of its block, an element of the weight may lie

* half a step of the element type at that magnitude from its code, times s;
* or beyond the largest code and clipped to it, as far as the rules that tools make s by let it:

| format | largest code | weight at most, in s | because |
|---|---|---|---|
| fp8_block | 448 | 448 | s is amax / 448, or that rounded up |
| nvfp4 | 6 | 6 (1 + u / s) | s is amax / 6 rounded to E4M3, u half a unit in its last place |
| mxfp4 | 6 | 8 | OCP's rule, 2**(floor(log2(amax)) - 2) |
| w4a8 | -8 and 7 | 8 | s is amax / 7, / 7.5 or / 8 |

* or clipped from further away, if the squared error of its block is within the budget of the one
  that our quantizer makes with default options: tools that search for scales clip where it pays.

All of it with an allowance of 2**-8 of the weight. Many tools compute scales, and divide by them,
in bfloat16; each step rounds by up to 2**-9, and an element that near a tie may take either code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.formats import dequantize, get_format
from moequant.formats.blocks import expand_blocks
from moequant.formats.elements import E2M1_MAX, E4M3_MAX, E4M3_SMALLEST, INT4_MAX, INT4_MIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from moequant.formats import QuantizedWeight

_ALLOWANCE = 2.0**-8
_E4M3_SMALLEST_NORMAL_EXPONENT = -6


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
            f"{self.scale:.6g}, which is not the nearest code; {self.count} such elements"
        )


def find_out_of_bound(
    w: Tensor, q: QuantizedWeight, reference: QuantizedWeight, max_lost_db: float
) -> OutOfBound | None:
    """The first element of `q` that is further from `w` than rounding and clipping explain.

    Args:
        w: [N, K] float32, the source.
        q: what another tool made of it.
        reference: what our quantizer makes of it with default options.
        max_lost_db: by how much the SQNR of a clipped block may fall below the reference's.
    """
    rule = _RULES[q.format]
    block = get_format(q.format).block
    scale = expand_blocks(_block_scale(q), block, q.shape)
    decoded = dequantize(q)
    error = (w - decoded).abs()
    magnitude = w.abs()
    allowance = _ALLOWANCE * magnitude
    # A zero scale leaves no codes to choose from, and no quotient.
    in_steps = torch.where(scale > 0, magnitude / scale, 0.0)
    # Written so that NaN, which compares false, is beyond its bound.
    bad = ~(error <= rule.half_step(in_steps) * scale + allowance)
    if not bad.any():
        return None
    clipped = error <= magnitude - torch.where(w < 0, rule.lowest, rule.highest) * scale + allowance
    reach = expand_blocks(rule.reach(q), block, q.shape)
    bad &= ~(clipped & (magnitude <= reach + allowance))
    if bad.any():
        budget = 10 ** (max_lost_db / 10)
        pays = _block_error(w, decoded, block) <= budget * _block_error(
            w, dequantize(reference), block
        )
        bad &= ~(clipped & expand_blocks(pays, block, q.shape))
    if not bad.any():
        return None
    index = tuple(bad.nonzero()[0].tolist())
    return OutOfBound(
        index=index,
        weight=w[index].item(),
        decoded=decoded[index].item(),
        scale=scale[index].item(),
        count=int(bad.sum()),
    )


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """What holds for one format.

    Attributes:
        half_step: from |w| / s, half the distance of the codes around it.
        lowest: magnitude of the largest negative code.
        highest: the largest positive code.
        reach: from a weight, the largest magnitude each block's scale is meant for.
    """

    half_step: Callable[[Tensor], Tensor]
    lowest: float
    highest: float
    reach: Callable[[QuantizedWeight], Tensor]


def _block_scale(q: QuantizedWeight) -> Tensor:
    """Scale of each block, global scale included, float32."""
    scale = q.scale.float()
    return scale if q.global_scale is None else scale * q.global_scale


def _half_step_e2m1(x: Tensor) -> Tensor:
    """Steps are 0.5 up to 2, 1 up to 4 and 2 up to 6."""
    return torch.where(x < 2, 0.25, torch.where(x < 4, 0.5, 1.0))


def _half_step_e4m3(x: Tensor) -> Tensor:
    """Eight steps an octave; below 2**-6 they stay as they are there."""
    _, exponent = torch.frexp(x.clamp(E4M3_SMALLEST, E4M3_MAX))
    octave = (exponent - 1).clamp(min=_E4M3_SMALLEST_NORMAL_EXPONENT)
    return torch.ldexp(torch.full_like(x, 2.0**-4), octave)


def _half_step_int4(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.5)


def _reach_nvfp4(q: QuantizedWeight) -> Tensor:
    assert q.global_scale is not None
    scale = q.scale.float()
    return E2M1_MAX * (scale + _half_step_e4m3(scale)) * q.global_scale


_RULES = {
    "fp8_block": _Rule(
        half_step=_half_step_e4m3,
        lowest=E4M3_MAX,
        highest=E4M3_MAX,
        reach=lambda q: E4M3_MAX * _block_scale(q),
    ),
    "nvfp4": _Rule(
        half_step=_half_step_e2m1, lowest=E2M1_MAX, highest=E2M1_MAX, reach=_reach_nvfp4
    ),
    "mxfp4": _Rule(
        half_step=_half_step_e2m1,
        lowest=E2M1_MAX,
        highest=E2M1_MAX,
        reach=lambda q: 8.0 * _block_scale(q),
    ),
    "w4a8": _Rule(
        half_step=_half_step_int4,
        lowest=float(-INT4_MIN),
        highest=float(INT4_MAX),
        reach=lambda q: 8.0 * _block_scale(q),
    ),
}


def _block_error(w: Tensor, decoded: Tensor, block: tuple[int, int]) -> Tensor:
    """Squared error of each block, float64: [N, K] to [ceil(N / bn), ceil(K / bk)]."""
    (N, K), (block_n, block_k) = w.shape, block
    square = (w.double() - decoded).square()
    padded = torch.nn.functional.pad(square, (0, -K % block_k, 0, -N % block_n))
    tiles = padded.reshape(padded.shape[0] // block_n, block_n, padded.shape[1] // block_k, block_k)
    return tiles.sum((1, 3))
