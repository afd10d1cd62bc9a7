"""Element types: their values, and rounding to them.

| element | values | -0 | out of range |
|---|---|---|---|
| E2M1 | 0 .5 1 1.5 2 3 4 6 and their negatives, bit 3 the sign | kept, code 8 | saturates at 6 |
| E4M3 | torch.float8_e4m3fn, finite up to 448 | kept, 0x80 | saturates at 448 |
| E8M0 | 2**(byte - 127), byte 255 is NaN | has no zero and no sign | caller clamps the exponent |
| INT4 | -8 .. 7, two's complement | becomes 0 | saturates at -8 and 7 |

All rounding is to nearest, ties to even (E2M1: to the even code). In the floating-point elements a
negative value that rounds to zero keeps its sign.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0); OCP 8-bit Floating Point v1.0 (E4M3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9
E8M0_BIAS = 127
INT4_MIN, INT4_MAX = -8, 7

FLOAT32_TINY = 2.0**-126
"""The smallest normal float32."""
E2M1_FLOAT32_MAX = 1.5 * 2.0**127
E4M3_FLOAT32_MAX = 1.875 * 2.0**127
"""The largest finite float32 with as many significant bits as the element: a larger weight rounds
to 2**128, which is Inf. Also finite in bfloat16."""


def encode_e2m1(x: Tensor) -> Tensor:
    """Round float32 [...] to E2M1 codes 0..15, uint8 [...], one per byte."""
    magnitude = x.abs()
    # Steps are 0.5 up to 2, 1 up to 4 and 2 up to 6; round_ ties to even multiples of the step,
    # which are the even codes. In place, because fresh memory costs more than the arithmetic.
    code = magnitude.clamp(max=2).mul_(2).round_()
    code += magnitude.clamp(2, 4).round_().sub_(2)
    code += magnitude.clamp_(4, E2M1_MAX).div_(2).round_().sub_(2)
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: Tensor) -> Tensor:
    """E2M1 codes 0..15, uint8 [...], to float32 [...]."""
    # The table is computed on the device, from float16 bits scaled by 2**14: copying it from the
    # host would synchronize, and could not be captured in a CUDA graph.
    magnitude = torch.arange(8, dtype=torch.int16, device=code.device)
    values = (magnitude << 9).view(torch.float16).float() * 2.0**14
    table = torch.cat([values, -values])
    # index_select takes a third of the time of table[code].
    return table.index_select(0, code.flatten().int()).reshape(code.shape)


def encode_e4m3(x: Tensor) -> Tensor:
    """Round float32 [...] to float8_e4m3fn.

    Clamps first: whether torch's own cast saturates or makes NaN depends on release and device.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e4m3(code: Tensor) -> Tensor:
    """float8_e4m3fn [...] to float32 [...], exact.

    On a CPU, torch's own cast is slow, so the bits are moved into a float16, which then has the
    number times 2**-8, also for subnormals. This takes a quarter of the time.
    """
    if code.device.type != "cpu":
        return code.float()
    bits = code.view(torch.int8).to(torch.int16)
    numbers = ((bits << 7) & -0x4080).view(torch.float16).float().mul_(2.0**8)
    # All ones except the sign is NaN; the code above would decode it as 480.
    nan = (bits & 0x7F) == 0x7F
    return numbers.masked_fill_(nan, torch.nan) if nan.any() else numbers


def encode_e8m0(exponent: Tensor) -> Tensor:
    """Exponents -127..127, integer [...], to float8_e8m0fnu [...] holding 2**exponent."""
    return (exponent + E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def decode_e8m0(scale: Tensor) -> Tensor:
    """float8_e8m0fnu [...] to float32 [...], exact; byte 0 is the denormal 2**-127."""
    return scale.float()


def encode_int4(x: Tensor) -> Tensor:
    """Round float32 [...] to INT4, one code per byte: uint8 0..15, two's complement."""
    code = torch.round(x).clamp(INT4_MIN, INT4_MAX).to(torch.int8)
    return code.view(torch.uint8) & 0xF


def decode_int4(code: Tensor) -> Tensor:
    """Two's complement nibbles, uint8 0..15 [...], to float32 [...]."""
    return ((code ^ 8).to(torch.int8) - 8).float()


def pack_nibbles(code: Tensor) -> Tensor:
    """Codes 0..15, uint8 [..., K], to bytes [..., K/2]: the even column in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: uint8 [..., K/2] to codes [..., K]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def divide(x: Tensor, divisor: float) -> Tensor:
    """Correctly rounded float32 quotients, on every device.

    Dividing by a Python number, torch multiplies by its rounded reciprocal on CUDA, which gives
    another result for divisors such as 448.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def ceil_exponent_of(x: Tensor) -> Tensor:
    """ceil(log2(x)) of positive normal float32 [...], int32, read from the exponent bits."""
    return ((x.view(torch.int32) + 0x7FFFFF) >> 23) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as float32, exact, for exponents -126..127, int32 [...]."""
    return ((exponent + 127) << 23).view(torch.float32)


def half_step_e2m1(x: Tensor) -> Tensor:
    """Steps are 0.5 up to 2, 1 up to 4 and 2 up to 6."""
    return torch.where(x < 2, 0.25, torch.where(x < 4, 0.5, 1.0))


def half_step_e4m3(x: Tensor) -> Tensor:
    """Eight steps an octave; below 2**-6 they stay as they are there."""
    _, exponent = torch.frexp(x.clamp(E4M3_SMALLEST, E4M3_MAX))
    octave = (exponent - 1).clamp(min=-6)
    return torch.ldexp(torch.full_like(x, 2.0**-4), octave)


def half_step_int4(x: Tensor) -> Tensor:
    """Steps are 1."""
    return torch.full_like(x, 0.5)


@dataclass(frozen=True, kw_only=True)
class Element:
    """What one code of a format is.

    Attributes:
        name: as kernels call it.
        bits: of a code; two codes of four bits share a byte.
        dtype: of the tensor that holds codes.
        lowest: the lowest number.
        largest: the largest finite number.
        float32_max: the largest float32 with as many significant bits; weights beyond would round
            to Inf.
        encode: float32 [...] rounded to codes, one in each element of the result.
        decode: the inverse, to float32 [...].
        half_step: half the distance of the numbers around each magnitude, float32 [...].
    """

    name: str
    bits: int
    dtype: torch.dtype
    lowest: float
    largest: float
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    half_step: Callable[[Tensor], Tensor]
    float32_max: float = torch.finfo(torch.float32).max


E2M1 = Element(
    name="e2m1",
    bits=4,
    dtype=torch.uint8,
    lowest=-E2M1_MAX,
    largest=E2M1_MAX,
    encode=encode_e2m1,
    decode=decode_e2m1,
    half_step=half_step_e2m1,
    float32_max=E2M1_FLOAT32_MAX,
)
E4M3 = Element(
    name="e4m3",
    bits=8,
    dtype=torch.float8_e4m3fn,
    lowest=-E4M3_MAX,
    largest=E4M3_MAX,
    encode=encode_e4m3,
    decode=decode_e4m3,
    half_step=half_step_e4m3,
    float32_max=E4M3_FLOAT32_MAX,
)
INT4 = Element(
    name="int4",
    bits=4,
    dtype=torch.uint8,
    lowest=INT4_MIN,
    largest=INT4_MAX,
    encode=encode_int4,
    decode=decode_int4,
    half_step=half_step_int4,
)


def _plain(name: str, dtype: torch.dtype) -> Element:
    """Numbers that are not quantized: a floating-point dtype of torch."""
    info = torch.finfo(dtype)

    def half_step(x: Tensor) -> Tensor:
        _, exponent = torch.frexp(x.clamp(min=info.tiny))
        return torch.ldexp(torch.full_like(x, info.eps / 4), exponent)

    return Element(
        name=name,
        bits=info.bits,
        dtype=dtype,
        lowest=info.min,
        largest=info.max,
        encode=lambda x: x.to(dtype),
        decode=lambda code: code.float(),
        half_step=half_step,
    )


BF16 = _plain("bf16", torch.bfloat16)
FP16 = _plain("fp16", torch.float16)
FP32 = _plain("fp32", torch.float32)
