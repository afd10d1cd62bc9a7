"""INT4 with a BF16 scale per 128 columns; meaning: `moequant.formats.w4a8`.

    w        [rows, K]
    qdata    uint8 [rows, K / 2]         two codes a byte, the even column in the low nibble
    scale    int16 [rows, K / 128]       bits of bfloat16

Scales depend on the largest of their row, so a program holds whole rows, in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.launch import INTERPRETED
from moequant.kernels.quantize.words import (
    EXACT,
    as_float,
    as_words,
    decode_e4m3,
    encode_e4m3,
    group_sum,
    magnitude_bits,
    quotients,
    report,
    source_of,
    split_words,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_COLUMNS = 65536
"""Longest row that a program holds."""

_SCALE_MAX = tl.constexpr((2.0 - 2.0**-7) * 2.0**124)
"""The largest bfloat16 over 8: beyond, the code -8 would decode to Inf."""
_CHANNEL_SCALE_MIN = tl.constexpr(1.0 / (448 * 512))
"""The smallest scale of vLLM's loader."""

_WORDS_A_WARP = 1024
_WORDS_A_WARP_SEARCHED = 256


def quantize(w: Tensor, qdata: Tensor, scale: Tensor, largest: Tensor, *, search: bool) -> None:
    """Quantize rows; which weight they are of does not matter.

    Args:
        w: [..., K] contiguous, bfloat16, float16 or float32, K a multiple of 128 and at most
            MAX_COLUMNS.
        qdata: written; as many rows as `w` has.
        scale: written.
        largest: int32 [1], 0 before; bits of a magnitude that is Inf or NaN, if there is one.
        search: take of the steps near the default the one of least squared error.
    """
    if w.numel() == 0:
        return
    K = w.shape[-1]
    assert K <= MAX_COLUMNS, K
    rows, groups = w.numel() // K, triton.next_power_of_2(K // 128)
    words_a_warp = _WORDS_A_WARP_SEARCHED if search else _WORDS_A_WARP
    at_once = max(1, 4 * words_a_warp // (groups * 64))
    quantize_rows[(triton.cdiv(rows, at_once),)](
        as_words(w),
        qdata,
        scale,
        largest,
        rows,
        K // 128,
        SEARCH=search,
        FUSED=not INTERPRETED,
        SOURCE=source_of(w),
        ROWS=at_once,
        GROUPS=groups,
        WHOLE=rows % at_once == 0 and groups == K // 128,
        num_warps=max(4, min(32, at_once * groups * 64 // words_a_warp)),
        **EXACT,
    )


@triton.jit
def quantize_rows(
    words,
    qdata,
    scale,
    largest,
    rows,
    groups,
    SEARCH: tl.constexpr,
    FUSED: tl.constexpr,
    SOURCE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program: ROWS rows of up to GROUPS groups. WHOLE: there is nothing less."""
    ALL: tl.constexpr = ROWS * GROUPS
    of = tl.arange(0, ALL)
    first = tl.program_id(0).to(tl.int64) * ROWS * groups
    if WHOLE:
        group = of
    else:
        group = of // GROUPS * groups + of % GROUPS
        live = (of // GROUPS < rows - tl.program_id(0) * ROWS) & (of % GROUPS < groups)
    at = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    if WHOLE:
        word = tl.load(words + first * 64 + at)
    else:
        word = tl.load(words + first * 64 + at, mask=live[:, None], other=0)
    even, odd = split_words(word, SOURCE)
    amax = tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)), 1)
    report(largest, tl.max(amax, 0))
    above = tl.math.div_rn(tl.max(tl.maximum(even, odd), 1), 8.0)
    step = tl.maximum(above, tl.math.div_rn(tl.min(tl.minimum(even, odd), 1), -9.0))
    if SEARCH:
        step = step * best_factor(even, odd, step, ALL, FUSED)
    bits = scale_of(tl.reshape(step, (ROWS, GROUPS)))
    bits = tl.reshape(bits, (ALL,))
    # 2**16 times too large, so that the reciprocal of the largest scale has bits to spare.
    even, odd = quotients(
        even, odd, as_float(bits) * 0.0000152587890625, SOURCE != "float32", FUSED
    )
    byte = ((encode_int4(even) & 15) | (encode_int4(odd) << 4)).to(tl.uint8)
    if WHOLE:
        tl.store(qdata + first * 64 + at, byte)
        tl.store(scale + first + group, (bits >> 16).to(tl.int16))
    else:
        tl.store(qdata + first * 64 + at, byte, mask=live[:, None])
        tl.store(scale + first + group, (bits >> 16).to(tl.int16), mask=live)


@triton.jit
def scale_of(step):
    """Bits, as of float32, of the bfloat16 scales for steps [ROWS, GROUPS] of whole rows."""
    row_max = as_float(round_bfloat16(tl.minimum(tl.max(step, 1), _SCALE_MAX)))
    channel = tl.maximum(tl.math.div_rn(row_max, 448.0), _CHANNEL_SCALE_MIN)
    row_scale = (channel * 8.0)[:, None]
    in_row = tl.math.div_rn(step, row_scale)
    in_row = tl.minimum(tl.maximum(in_row, 0.001953125), 56.0)
    return round_bfloat16(decode_e4m3(encode_e4m3(in_row)) * row_scale)


@triton.jit
def round_bfloat16(x):
    """Bits of float32, finite and not negative, rounded to bfloat16, to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def round_int4(x):
    """float32 to the integer beside it, ties to even, from -8 to 7."""
    # 1.5 * 2**23: such a sum has steps of 1.
    return (tl.minimum(tl.maximum(x, -8.0), 7.0) + 12582912.0) - 12582912.0


@triton.jit
def encode_int4(x):
    """float32, 2**16 times too large, to two's complement in the low nibble; see `round_int4`."""
    sum = tl.minimum(tl.maximum(x, -8.0 * 65536), 7.0 * 65536) + 12582912.0 * 65536
    return sum.to(tl.int32, bitcast=True)


@triton.jit
def best_factor(even, odd, step, GROUPS: tl.constexpr, FUSED: tl.constexpr):
    """What to multiply steps [GROUPS] by for the least squared error, the earlier of equals."""
    step = tl.where(step > 0, step, 1.0)[:, None]
    even, odd = tl.math.div_rn(even, step), tl.math.div_rn(odd, step)
    best = tl.full([GROUPS], 1.0, tl.float32)
    least = squared_error(even, odd, 16, GROUPS, FUSED)
    best, least = consider(even, odd, 15, best, least, GROUPS, FUSED)
    best, least = consider(even, odd, 17, best, least, GROUPS, FUSED)
    best, least = consider(even, odd, 14, best, least, GROUPS, FUSED)
    best, least = consider(even, odd, 18, best, least, GROUPS, FUSED)
    best, least = consider(even, odd, 13, best, least, GROUPS, FUSED)
    return best


@triton.jit
def consider(even, odd, n: tl.constexpr, best, least, GROUPS: tl.constexpr, FUSED: tl.constexpr):
    """Take n sixteenths where they leave less than `least`."""
    error = squared_error(even, odd, n, GROUPS, FUSED)
    return tl.where(error < least, n / 16, best), tl.minimum(error, least)


@triton.jit
def squared_error(even, odd, n: tl.constexpr, GROUPS: tl.constexpr, FUSED: tl.constexpr):
    """Squared error of each group, in units of its step, under n sixteenths of that step."""
    even = round_int4(sixteenths(even, n, FUSED)) * (n / 16) - even
    odd = round_int4(sixteenths(odd, n, FUSED)) * (n / 16) - odd
    return group_sum(even * even, odd * odd, GROUPS, 6)


@triton.jit
def sixteenths(x, n: tl.constexpr, FUSED: tl.constexpr):
    """Quotients x / (n / 16), for `round_int4`.

    FUSED: see `quotients`. Then the sum is off by 2**-30 of itself before it is rounded. That is
    enough: unless x is a half times n / 16, it lies more than 0.53 units in the last place beside
    it once divided. Tried for every float32 from 1/8 to 20.
    """
    if FUSED:
        # 12 bits of the reciprocal, and the rest.
        return tl.fma(x, (32768 // n) / 2048, x * (16 / n - (32768 // n) / 2048))
    return tl.math.div_rn(x, n / 16)
