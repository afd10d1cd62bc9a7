"""E4M3 codes of groups of values, in a kernel: scale amax / 448, 1 where amax is 0."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_groups(x, NATIVE: tl.constexpr):
    """E4M3 codes and float32 scales of `x` float32 [groups, values of a group].

    Codes are those of `x / scale`, to nearest even.
    """
    scale = scale_of(tl.max(tl.abs(x), 1))
    return encode_e4m3(tl.math.div_rn(x, scale[:, None]), NATIVE), scale


@triton.jit
def scale_of(amax):
    """Scale of a group: amax / 448, and 1 where that is 0 or underflows to it."""
    scale = tl.math.div_rn(amax, 448.0)
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """float32 to float8_e4m3fn, to nearest even, saturating at 448.

    NATIVE = False computes the code from the bits: Triton's interpreter rounds its own cast wrong
    where the mantissa carries into the exponent.
    """
    if NATIVE:
        return x.to(tl.float8e4nv)
    return encode_e4m3_bits(x).to(tl.float8e4nv, bitcast=True)


@triton.jit
def encode_e4m3_bits(x):
    """The same as a byte, for devices that know no FP8 (before SM89)."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    mbits = magnitude.to(tl.int32, bitcast=True)
    # Normal: drop 20 of 23 mantissa bits to nearest even, rebias the exponent from 127 to 7.
    normal = ((mbits + 0x7FFFF + ((mbits >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal: adding 2**14 leaves multiples of 2**-9, the smallest code, in the low bits.
    offset: tl.constexpr = 16384.0
    subnormal = (magnitude + offset).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(x != x, 0x7F, code).to(tl.uint8)
