"""FP4 E2M1 with an E8M0 scale per 32 columns; meaning: `moequant.formats.mxfp4`.

w        [groups, 32]
qdata    uint8 [groups, 16]    two codes a byte, the even column in the low nibble
scale    uint8 [groups]        E8M0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.quantize.words import (
    EXACT,
    as_float,
    as_words,
    clamp_e2m1,
    group_sum,
    magnitude_bits,
    pack_e2m1,
    report,
    round_e2m1,
    source_of,
    split_words,
)

if TYPE_CHECKING:
    from torch import Tensor

_GROUPS = 64
_WARPS = 2

# What a rule adds to the bits of amax: the exponent moves up from mantissa 2, 1.75, and above 1.5.
_ROUND_UP_BITS = {"floor": 0, "even": 0x200000, "mse": 0x200000, "ceil": 0x3FFFFF}


def quantize(w: Tensor, qdata: Tensor, scale: Tensor, largest: Tensor, *, scale_rule: str) -> None:
    """Quantize groups; which weight they are of does not matter.

    Args:
        w: [..., K] contiguous, bfloat16, float16 or float32, K a multiple of 32.
        qdata: written; as many groups as `w` has.
        scale: written.
        largest: int32 [1], 0 before; bits of a magnitude that is Inf or NaN, if there is one.
        scale_rule: "even", "floor", "ceil" or "mse".
    """
    groups = w.numel() // 32
    if groups == 0:
        return
    quantize_groups[(triton.cdiv(groups, _GROUPS),)](
        as_words(w),
        qdata,
        scale,
        largest,
        groups,
        UP=_ROUND_UP_BITS[scale_rule],
        SEARCH=scale_rule == "mse",
        SOURCE=source_of(w),
        GROUPS=_GROUPS,
        WHOLE=groups % _GROUPS == 0,
        num_warps=_WARPS,
        **EXACT,
    )


@triton.jit
def quantize_groups(
    words,
    qdata,
    scale,
    largest,
    groups,
    UP: tl.constexpr,
    SEARCH: tl.constexpr,
    SOURCE: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program: GROUPS groups. WHOLE: no program has fewer."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    if WHOLE:
        word = tl.load(words + first * 16 + at)
    else:
        live = group < groups - first
        word = tl.load(words + first * 16 + at, mask=live[:, None], other=0)
    even, odd = split_words(word, SOURCE)
    even_bits, odd_bits = magnitude_bits(even), magnitude_bits(odd)
    amax = tl.max(tl.maximum(even_bits, odd_bits), 1)
    report(largest, tl.max(amax, 0))
    # Two less than the exponent of amax is that of E2M1's largest power of two, 4.
    byte = tl.maximum((clamp_e2m1(amax) + UP) >> 23, 2) - 2
    byte = tl.where(amax == 0, 127, byte)
    if SEARCH:
        # Without a search, what is beyond saturates like what is clamped.
        even_bits, odd_bits = clamp_e2m1(even_bits), clamp_e2m1(odd_bits)
    m_even, m_odd = as_float(even_bits), as_float(odd_bits)
    if SEARCH:
        factor = reciprocal(byte)[:, None]
        lower = squared_error(m_even * factor, m_odd * factor, 2.0, 0.5, GROUPS)
        same = squared_error(m_even * factor, m_odd * factor, 1.0, 1.0, GROUPS)
        byte = tl.where((lower < same) & (byte > 0), byte - 1, byte)
    factor = reciprocal(byte)[:, None]
    code = pack_e2m1(m_even * factor, m_odd * factor, word, SOURCE)
    if WHOLE:
        tl.store(qdata + first * 16 + at, code)
        tl.store(scale + first + group, byte.to(tl.uint8))
    else:
        tl.store(qdata + first * 16 + at, code, mask=live[:, None])
        tl.store(scale + first + group, byte.to(tl.uint8), mask=live)


@triton.jit
def reciprocal(byte):
    """1 over the scale that an E8M0 byte from 0 to 253 stands for."""
    return as_float((254 - byte) << 23)


@triton.jit
def squared_error(even, odd, up: tl.constexpr, down: tl.constexpr, GROUPS: tl.constexpr):
    """Squared error of each group, in units of its scale, under that scale times `down`."""
    even = round_e2m1(even * up) * down - even
    odd = round_e2m1(odd * up) * down - odd
    return group_sum(even * even, odd * odd, GROUPS, 4)
