"""Codes to values and back, in registers, on any architecture.

Codes become floating-point numbers by moving their bits, with an exponent that is off by a
constant, denormals too; what is left is an exact multiplication. For two four-bit codes at once
that is written in PTX (`halves` of `e2m1_pairs` and `int4_pairs`), six instructions and three; the
interpreter decodes them one by one. On devices from SM89 on, E4M3 is converted natively (NATIVE).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moequant.kernels.fp8_codes import encode_e4m3_bits


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """uint8 to float32, exact in bfloat16 too; NaN stays NaN."""
    if NATIVE:
        # By way of float32, from which bfloat16 is made in pairs; from float16 it is one by one.
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        wide = code.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def encode_e4m3_byte(x, NATIVE: tl.constexpr):
    """float32 to uint8, to nearest even, saturating at 448."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else encode_e4m3_bits(x)


@triton.jit
def decode_e2m1(code):
    """Codes 0 to 15, uint8, to float32, exact."""
    wide = code.to(tl.uint16)
    half = ((wide & 8) << 12) | ((wide & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


_E2M1_PAIR = tl.constexpr(
    """{
    .reg .b32 sign, pair, big, zero;
    mov.b32 big, 0x7E807E80;
    mov.b32 zero, 0x80008000;
    mul.lo.u32 sign, $1, 0x01001000;
    and.b32 sign, sign, 0x80008000;
    mul.lo.u32 pair, $1, 0x00040040;
    lop3.b32 pair, pair, 0x01C001C0, sign, 0xEA;
    fma.rn.bf16x2 pair, pair, big, zero;
    fma.rn.bf16x2 $0, pair, $2, zero;
    }"""
)
"""$0: the codes of byte $1, low one first, as bfloat16, times those of $2.

The bits of a code, moved to their places, are a bfloat16 2**126 times too small, and denormal for
0.5. A product of fma with -0 added is exact, and keeps the sign of a zero.
"""

_INT4_PAIR = tl.constexpr(
    """{
    .reg .b32 pair, one, offset;
    mov.b32 one, 0x3F803F80;
    mov.b32 offset, 0xC308C308;
    mul.lo.u32 pair, $1, 0x1001;
    lop3.b32 pair, pair, 0x000F000F, 0x43084308, 0x6A;
    fma.rn.bf16x2 $0, pair, one, offset;
    }"""
)
"""$0: the codes of byte $1, low one first, as bfloat16: 128 + (code ^ 8) has the code in its last
bits, and 136 is taken away.
"""


@triton.jit
def e2m1_pairs(byte, scale):
    """The two codes of each byte, uint8, times `scale` of its shape: see `halves`.

    A scale is a float32 that is exact in bfloat16, which is its upper half.
    """
    bits = scale.to(tl.uint32, bitcast=True)
    twice = (bits & 0xFFFF0000) | (bits >> 16)
    return tl.inline_asm_elementwise(
        _E2M1_PAIR, "=r,r,r", [byte.to(tl.uint32), twice], tl.uint32, True, 1
    )


@triton.jit
def int4_pairs(byte):
    """The two codes of each byte, uint8: see `halves`."""
    return tl.inline_asm_elementwise(_INT4_PAIR, "=r,r", [byte.to(tl.uint32)], tl.uint32, True, 1)


@triton.jit
def halves(pair):
    """Two bfloat16 in each uint32 [N, K], the low half first, as bfloat16 [N, K, 2]."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def decode_int4(code):
    """Two's complement, uint8 0 to 15, to float32."""
    return (code ^ 8).to(tl.float32) - 8.0


@triton.jit
def decode_e8m0(byte):
    """uint8 to float32: 2**(byte - 127); 0 is a denormal, 255 NaN."""
    bits = tl.where(byte == 0, 0x400000, byte.to(tl.int32) << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def dot_native(a, b, acc, INTERPRETED: tl.constexpr):
    """`acc + a @ b` of bfloat16, or of float16, in float32.

    The interpreter multiplies the bits of bfloat16 as integers.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def dot_exact(a, x, acc, A_SPLIT: tl.constexpr, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """`acc + a @ x`, both of them sums of A_SPLIT and SPLIT bfloat16, smallest first.

    1 for bfloat16, 2 for float16, 3 for float32. Two of float16 are multiplied as they are.
    """
    if A_SPLIT == 2 and SPLIT == 2:
        return dot_native(a, x, acc, INTERPRETED)
    high = a.to(tl.bfloat16)
    if A_SPLIT > 1:
        rest = a.to(tl.float32) - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        if A_SPLIT > 2:
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = dot_split(low, x, acc, SPLIT, INTERPRETED)
        acc = dot_split(middle, x, acc, SPLIT, INTERPRETED)
    return dot_split(high, x, acc, SPLIT, INTERPRETED)


@triton.jit
def dot_split(a, x, acc, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr):
    """The same for `a` in bfloat16."""
    high = x.to(tl.bfloat16)
    if SPLIT > 1:
        rest = x.to(tl.float32) - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        if SPLIT > 2:
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = dot_native(a, low, acc, INTERPRETED)
        acc = dot_native(a, middle, acc, INTERPRETED)
    return dot_native(a, high, acc, INTERPRETED)
