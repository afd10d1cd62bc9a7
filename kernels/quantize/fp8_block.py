"""FP8 E4M3 with a scale per 128x128 block; meaning: `moequant.formats.fp8_block`.

w        [B, N, K]
qdata    uint8   [B, N, K]                        E4M3 codes
scale    float32 [B, ceil(N / 128), ceil(K / 128)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.portable.codes import encode_e4m3_byte
from moequant.kernels.quantize.words import (
    EXACT,
    as_bits,
    as_float,
    has_native_e4m3,
    magnitude_bits,
    report,
    source_of,
    widen,
)

if TYPE_CHECKING:
    from torch import Tensor

_WARPS = 4
_WARPS_DIVIDING = 8
_E4M3_FLOAT32_MAX = tl.constexpr(1.875 * 2.0**127)
"""A larger weight would decode to Inf."""


def quantize(
    w: Tensor, qdata: Tensor, scale: Tensor, largest: Tensor, *, power_of_two: bool
) -> None:
    """Quantize each of B weights.

    Args:
        w: [B, N, K] contiguous, bfloat16, float16 or float32.
        qdata: written; the module says its shape.
        scale: written.
        largest: int32 [1], 0 before; bits of a magnitude that is Inf or NaN, if there is one.
        power_of_two: round scales up to one.
    """
    B, N, K = w.shape
    if w.numel() == 0:
        return
    quantize_block[(triton.cdiv(N, 128) * triton.cdiv(K, 128), B)](
        as_bits(w),
        qdata,
        scale,
        largest,
        N,
        K,
        POWER_OF_TWO=power_of_two,
        NATIVE=has_native_e4m3(w.device),
        SOURCE=source_of(w),
        WHOLE=N % 128 == 0 and K % 128 == 0,
        num_warps=_WARPS if power_of_two else _WARPS_DIVIDING,
        **EXACT,
    )


@triton.jit
def quantize_block(
    bits,
    qdata,
    scale,
    largest,
    N,
    K,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    SOURCE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One program: one block. WHOLE: no block is ragged."""
    block, weight = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across = tl.cdiv(K, 128)
    row = (block // across) * 128 + tl.arange(0, 128)[:, None]
    col = (block % across) * 128 + tl.arange(0, 128)[None, :]
    at = (weight * N + row) * K + col
    if WHOLE:
        stored = tl.load(bits + at)
    else:
        stored = tl.load(bits + at, mask=(row < N) & (col < K), other=0)
    x = widen(stored, SOURCE)
    amax_bits = tl.max(tl.max(magnitude_bits(x), 1), 0)
    report(largest, amax_bits)
    block_scale = scale_of(amax_bits, POWER_OF_TWO)
    tl.store(scale + weight * (tl.cdiv(N, 128) * across) + block, block_scale)
    x = tl.minimum(tl.maximum(x, -_E4M3_FLOAT32_MAX), _E4M3_FLOAT32_MAX)
    if POWER_OF_TWO:
        scaled = x * as_float((254 << 23) - block_scale.to(tl.int32, bitcast=True))
    else:
        scaled = tl.math.div_rn(x, block_scale)
    code = encode_e4m3_byte(scaled, NATIVE)
    if WHOLE:
        tl.store(qdata + at, code)
    else:
        tl.store(qdata + at, code, mask=(row < N) & (col < K))


@triton.jit
def scale_of(amax_bits, POWER_OF_TWO: tl.constexpr):
    """Scale of a block whose largest magnitude has these bits; normal, and 1 for a zero block."""
    amax = tl.minimum(as_float(amax_bits), _E4M3_FLOAT32_MAX)
    bits = tl.math.div_rn(amax, 448.0).to(tl.int32, bitcast=True)
    if POWER_OF_TWO:
        bits = (bits + 0x7FFFFF) & 0x7F800000
    return tl.where(amax_bits == 0, 1.0, as_float(tl.maximum(bits, 0x00800000)))
