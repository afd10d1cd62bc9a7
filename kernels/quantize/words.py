"""What the kernels share: weights as integers, one or two in a word, and E2M1 codes.

A word holds a weight of an even column in its lower half and the next one in its upper half. So
both halves of a packed byte are computed where they were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moequant.kernels.launch import INTERPRETED

if TYPE_CHECKING:
    from torch import Tensor

EXACT = {"enable_fp_fusion": False}
"""Launch options: `a * b + c` is rounded twice, as it is written."""

INFINITY = tl.constexpr(0x7F800000)
"""Bits of float32: magnitudes from here on are Inf and NaN."""

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_WORDS = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}

_E2M1_FLOAT32_MAX_BITS = tl.constexpr(0x7F400000)


def as_bits(w: Tensor) -> Tensor:
    """The bits of weights [..., K], as integers."""
    return w.view(_BITS[w.dtype])


def as_words(w: Tensor) -> Tensor:
    """Contiguous [..., K], K even, as words of two weights, int32 or int64 [words]."""
    return w.reshape(-1).view(_WORDS[w.dtype])


def source_of(w: Tensor) -> str:
    """What kernels call the dtype of `w`."""
    return str(w.dtype).removeprefix("torch.")


def has_native_e4m3(device: torch.device) -> bool:
    """Whether `device` casts to FP8 by itself."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def widen(bits, SOURCE: tl.constexpr):
    """Weights, given as integers, to float32.

    Shifts, because the cast from bfloat16 of Triton's interpreter flushes denormals.
    """
    if SOURCE == "bfloat16":
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif SOURCE == "float16":
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def split_words(word, SOURCE: tl.constexpr):
    """The weights of the even and of the odd columns, float32."""
    if SOURCE == "bfloat16":
        even = (word << 16).to(tl.float32, bitcast=True)
        odd = (word & -65536).to(tl.float32, bitcast=True)
    elif SOURCE == "float16":
        even, odd = widen(word.to(tl.int16), SOURCE), widen((word >> 16).to(tl.int16), SOURCE)
    else:
        even, odd = widen(word.to(tl.int32), SOURCE), widen((word >> 32).to(tl.int32), SOURCE)
    return even, odd


@triton.jit
def magnitude_bits(x):
    """Bits of |x|, float32: integers in the order of the magnitudes, NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def report(largest, amax_bits):
    """Leave word in `largest`, int32, if the magnitude of these bits is Inf or NaN."""
    if amax_bits >= INFINITY:
        tl.atomic_max(largest, amax_bits)


@triton.jit
def as_float(bits):
    """The float32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """Positive float32 to E4M3, int32 0 to 126, to nearest even, saturating at 448.

    Not by the cast, of which ptxas 12.8 reads a register that was never written where the codes
    are computed with afterwards (Triton 3.6.0, SM90).
    """
    bits = tl.minimum(x, 448.0).to(tl.int32, bitcast=True)
    # Drop 20 of 23 mantissa bits, rebias the exponent from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # A sum with 2**14 has steps of 2**-9, the smallest code.
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) & 15
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def decode_e4m3(code):
    """Positive E4M3, int32 1 to 126, to float32."""
    normal = as_float((code + (120 << 3)) << 20)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def quotients(even, odd, divisor, SHORT: tl.constexpr, FUSED: tl.constexpr):
    """Even and odd columns over the divisor of their group, float32 [groups].

    All three far from the ends of float32, but for quotients too small to count.

    FUSED: `fma` rounds once, as it does not in Triton's interpreter. Then two steps of correction
    with the rounded reciprocal give the rounded quotient: after the first it is off by less than a
    unit in the last place, and of such a one the second makes the nearest (P. Markstein,
    "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).

    SHORT: to be rounded to at most 4 bits, and of numbers of at most 11 bits by one of at most 8.
    Such a quotient is halfway between two results, or beside by 2**-13 of itself at least; so all
    that counts is that those halfway come out exactly. Here `high` has 12 bits, products with it
    are exact, and what `high` and `low` lack is less than 2**-30 of the quotient.
    """
    if SHORT:
        about = 1.0 / divisor
        high = as_float(about.to(tl.int32, bitcast=True) & -4096)
        low = ((1.0 - high * divisor) * about)[:, None]
        high = high[:, None]
        even, odd = tl.fma(even, high, even * low), tl.fma(odd, high, odd * low)
    elif FUSED:
        reciprocal = tl.math.div_rn(1.0, divisor)[:, None]
        even = corrected(even, divisor[:, None], reciprocal, even * reciprocal)
        odd = corrected(odd, divisor[:, None], reciprocal, odd * reciprocal)
    else:
        even = tl.math.div_rn(even, divisor[:, None])
        odd = tl.math.div_rn(odd, divisor[:, None])
    return even, odd


@triton.jit
def corrected(x, divisor, reciprocal, quotient):
    """The float32 nearest to x / divisor, from one that is near; see `quotients`."""
    quotient = tl.fma(tl.fma(-divisor, quotient, x), reciprocal, quotient)
    return tl.fma(tl.fma(-divisor, quotient, x), reciprocal, quotient)


@triton.jit
def clamp_e2m1(bits):
    """Bits of magnitudes, at most those of 1.5 * 2**127: beyond, E2M1 times a scale may be Inf."""
    return tl.minimum(bits, _E2M1_FLOAT32_MAX_BITS)


@triton.jit
def encode_e2m1(magnitude):
    """float32 magnitudes to E2M1, 0 to 7 in the low byte of an int32; the rest is of no use.

    Steps are 0.5 below 2, 1 up to 4 and 2 above. A sum with 2**22, 2**23 or 2**24 has that step and
    rounds to it, ties to even; the low bits of such a sum count steps, and the codes do so from 4
    at 2 and 6 at 4.
    """
    m = tl.minimum(magnitude, 6.0)
    offset = tl.where(m < 2.0, 4194304.0, tl.where(m < 4.0, 8388608.0 + 2.0, 16777216.0 + 8.0))
    return (m + offset).to(tl.int32, bitcast=True)


@triton.jit
def pack_e2m1(even, odd, word, SOURCE: tl.constexpr):
    """float32 magnitudes and the words whose signs they get to two E2M1 codes a byte, uint8."""
    if SOURCE == "float32":
        signs = ((word >> 28) & 0x08).to(tl.int32) | ((word >> 56) & 0x80).to(tl.int32)
    else:
        signs = ((word >> 12) & 0x08) | ((word >> 24) & 0x80)
    return (encode_e2m1(even) | (encode_e2m1(odd) << 4) | signs).to(tl.uint8)


@triton.jit
def round_e2m1(magnitude):
    """float32 magnitudes to the E2M1 number that `encode_e2m1` has the code of."""
    m = tl.minimum(magnitude, 6.0)
    offset = tl.where(m < 2.0, 4194304.0, tl.where(m < 4.0, 8388608.0, 16777216.0))
    return (m + offset) - offset


@triton.jit
def group_sum(even, odd, GROUPS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum of each group, halves to halves as `formats.blocks.group_sum` adds: [GROUPS].

    A sum of two is the same in either order, so each step is defined to the last bit.

    Args:
        even: float32 [GROUPS, 2**LEVELS], of the even columns.
        odd: of the odd columns.
        GROUPS: a power of two.
        LEVELS: at least 1.
    """
    for step in tl.static_range(LEVELS):
        even = tl.sum(tl.reshape(even, (GROUPS, 2, 2 ** (LEVELS - 1 - step))), 1)
        odd = tl.sum(tl.reshape(odd, (GROUPS, 2, 2 ** (LEVELS - 1 - step))), 1)
    return tl.reshape(even + odd, (GROUPS,))
