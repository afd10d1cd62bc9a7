"""FP4 E2M1 with an E4M3 scale per 16 columns and an FP32 scale per fused set.

Meaning: `moequant.formats.nvfp4`.

    w              [sets, groups, 16]
    qdata          uint8   [sets, groups, 8]    two codes a byte, the even column in the low nibble
    scale          uint8   [sets, groups]       E4M3
    global_scale   float32 [sets]

A set is all that shares a global scale: weights that lie one behind the other.
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
    clamp_e2m1,
    decode_e4m3,
    encode_e4m3,
    group_sum,
    magnitude_bits,
    pack_e2m1,
    quotients,
    round_e2m1,
    source_of,
    split_words,
)

if TYPE_CHECKING:
    from torch import Tensor

# A sixth, in two numbers as in `quotients`.
_SIXTH_HIGH = tl.constexpr(2730 / 16384)
_SIXTH_LOW = tl.constexpr(1 / 24576)

_GROUPS, _WARPS = 128, 1
_GROUPS_SEARCHED, _WARPS_SEARCHED = 64, 2
_WORDS_READ, _WARPS_READ = 32768, 32


def find_largest(w: Tensor, largest: Tensor) -> None:
    """Raise `largest` to the largest magnitude of each set; Inf and NaN count as larger than all.

    Args:
        w: [sets, n] contiguous, bfloat16, float16 or float32, n even.
        largest: int32 [sets], bits of float32.
    """
    sets, n = w.shape
    if w.numel() == 0:
        return
    largest_word[(triton.cdiv(n // 2, _WORDS_READ), sets)](
        as_words(w),
        largest,
        n // 2,
        SOURCE=source_of(w),
        WORDS=_WORDS_READ,
        WHOLE=n // 2 % _WORDS_READ == 0,
        num_warps=_WARPS_READ,
    )


def quantize(
    w: Tensor,
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    largest: Tensor,
    *,
    power_of_two: bool,
    search: bool,
) -> None:
    """Quantize sets whose largest magnitudes are known.

    Args:
        w: [sets, n] contiguous, bfloat16, float16 or float32, n a multiple of 16.
        qdata: written; the module says its shape.
        scale: written.
        global_scale: written.
        largest: int32 [sets], as `find_largest` leaves it.
        power_of_two: round global scales up to one.
        search: take of the scales near amax / 6 the one of least squared error.
    """
    sets, n = w.shape
    if sets == 0:
        return
    groups = n // 16
    at_once, warps = (_GROUPS_SEARCHED, _WARPS_SEARCHED) if search else (_GROUPS, _WARPS)
    # Without groups too, for the global scale.
    quantize_groups[(max(1, triton.cdiv(groups, at_once)), sets)](
        as_words(w),
        qdata,
        scale,
        global_scale,
        largest,
        groups,
        POWER_OF_TWO=power_of_two,
        SEARCH=search,
        FUSED=not INTERPRETED,
        SOURCE=source_of(w),
        GROUPS=at_once,
        WHOLE=groups % at_once == 0 and groups > 0,
        num_warps=warps,
        **EXACT,
    )


@triton.jit
def largest_word(
    words, largest, count, SOURCE: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr
):
    """One program: WORDS words of a set."""
    set_index = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * WORDS
    at = tl.arange(0, WORDS)
    if WHOLE:
        word = tl.load(words + set_index * count + first + at)
    else:
        word = tl.load(words + set_index * count + first + at, mask=at < count - first, other=0)
    even, odd = split_words(word, SOURCE)
    amax = tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)), 0)
    tl.atomic_max(largest + set_index, amax)


@triton.jit
def quantize_groups(
    words,
    qdata,
    scale,
    global_scale,
    largest,
    groups,
    POWER_OF_TWO: tl.constexpr,
    SEARCH: tl.constexpr,
    FUSED: tl.constexpr,
    SOURCE: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program: GROUPS groups of a set. WHOLE: no program has fewer."""
    set_index = tl.program_id(1).to(tl.int64)
    per_set = global_scale_of(tl.load(largest + set_index), POWER_OF_TWO)
    tl.store(global_scale + set_index, per_set, mask=tl.program_id(0) == 0)
    first = set_index * groups + tl.program_id(0) * GROUPS
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    if WHOLE:
        word = tl.load(words + first * 8 + at)
    else:
        live = group < groups - tl.program_id(0) * GROUPS
        word = tl.load(words + first * 8 + at, mask=live[:, None], other=0)
    even, odd = split_words(word, SOURCE)
    even_bits, odd_bits = magnitude_bits(even), magnitude_bits(odd)
    amax_bits = clamp_e2m1(tl.max(tl.maximum(even_bits, odd_bits), 1))
    amax = as_float(amax_bits)
    if SEARCH:
        # Without a search, what is beyond saturates like what is clamped.
        even_bits, odd_bits = clamp_e2m1(even_bits), clamp_e2m1(odd_bits)
    m_even, m_odd = as_float(even_bits), as_float(odd_bits)
    # The exponent of the global scale goes first: amax / 6 may be too small for a float32 where
    # the quotient is not. Exact, but for denormals, far below half of the smallest scale, which
    # encode as 0 anyway.
    factor = as_float((254 << 23) - (per_set.to(tl.int32, bitcast=True) & 0x7F800000))
    m_even, m_odd, amax, mantissa = m_even * factor, m_odd * factor, amax * factor, 1.0
    if not POWER_OF_TWO:
        mantissa = per_set * factor
        amax = tl.math.div_rn(amax, mantissa)
    SHORT: tl.constexpr = POWER_OF_TWO and SOURCE != "float32"
    sixth = tl.fma(amax, _SIXTH_HIGH, amax * _SIXTH_LOW) if SHORT else tl.math.div_rn(amax, 6.0)
    code = tl.maximum(encode_e4m3(sixth), 1)
    code = tl.where(amax_bits == 0, 0x38, code)
    if SEARCH:
        x_even, x_odd = m_even, m_odd
        if not POWER_OF_TWO:
            x_even, x_odd = tl.math.div_rn(m_even, mantissa), tl.math.div_rn(m_odd, mantissa)
        code = least_squares(x_even, x_odd, code, GROUPS, SHORT, FUSED)
    # Rounded as scale times global scale are, which may be a denormal.
    divisor = decode_e4m3(code) if POWER_OF_TWO else decode_e4m3(code) * per_set * factor
    even, odd = quotients(m_even, m_odd, divisor, SHORT, FUSED)
    byte = pack_e2m1(even, odd, word, SOURCE)
    if WHOLE:
        tl.store(qdata + first * 8 + at, byte)
        tl.store(scale + first + group, code.to(tl.uint8))
    else:
        tl.store(qdata + first * 8 + at, byte, mask=live[:, None])
        tl.store(scale + first + group, code.to(tl.uint8), mask=live)


@triton.jit
def global_scale_of(amax_bits, POWER_OF_TWO: tl.constexpr):
    """Global scale of a set whose largest magnitude has these bits: normal, 1 for zeros."""
    bits = tl.math.div_rn(as_float(amax_bits), 2688.0).to(tl.int32, bitcast=True)
    if POWER_OF_TWO:
        bits = (bits + 0x7FFFFF) & 0x7F800000
    return tl.where(amax_bits == 0, 1.0, as_float(tl.maximum(bits, 0x00800000)))


@triton.jit
def least_squares(even, odd, code, GROUPS: tl.constexpr, SHORT: tl.constexpr, FUSED: tl.constexpr):
    """The code near `code` of least squared error, the earlier one of equals.

    Args:
        even: float32 [GROUPS, 8], magnitudes of even columns over the global scale.
        odd: of odd columns.
        code: int32 [GROUPS], E4M3.
        GROUPS: a power of two.
        SHORT: see `quotients`.
        FUSED: likewise.
    """
    best, least = code, squared_error(even, odd, code, GROUPS, SHORT, FUSED)
    best, least = consider(even, odd, code - 1, best, least, GROUPS, SHORT, FUSED)
    best, least = consider(even, odd, code + 1, best, least, GROUPS, SHORT, FUSED)
    best, least = consider(even, odd, code - 2, best, least, GROUPS, SHORT, FUSED)
    for step in tl.static_range(2, 7):
        best, least = consider(even, odd, code + step, best, least, GROUPS, SHORT, FUSED)
    return best


@triton.jit
def consider(
    even, odd, code, best, least, GROUPS: tl.constexpr, SHORT: tl.constexpr, FUSED: tl.constexpr
):
    """Take `code`, if need be the next that is positive and finite, where it leaves less."""
    code = tl.minimum(tl.maximum(code, 1), 126)
    error = squared_error(even, odd, code, GROUPS, SHORT, FUSED)
    return tl.where(error < least, code, best), tl.minimum(error, least)


@triton.jit
def squared_error(even, odd, code, GROUPS: tl.constexpr, SHORT: tl.constexpr, FUSED: tl.constexpr):
    """Squared error of each group under the scale that has this code."""
    scale = decode_e4m3(code)
    q_even, q_odd = quotients(even, odd, scale, SHORT, FUSED)
    even = round_e2m1(q_even) * scale[:, None] - even
    odd = round_e2m1(q_odd) * scale[:, None] - odd
    return group_sum(even * even, odd * odd, GROUPS, 3)
