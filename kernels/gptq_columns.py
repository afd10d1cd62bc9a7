"""Round a block of columns in one kernel, as `round_columns_in_torch` of `quantizers` does.

Rows do not depend on each other: a program has a few, with all columns of the block in registers,
and adds the error of each column to those that follow. What is read from memory for a column is
asked for while the one before it is rounded.

Numbers are those of the reference, because no product is fused with the sum that it is added to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.block_scaled_quantize import encode_e2m1
from moequant.kernels.calls import on
from moequant.kernels.fp8_codes import encode_e4m3_bits
from moequant.kernels.launch import launch
from moequant.kernels.portable.codes import decode_e2m1, decode_e4m3, decode_int4

if TYPE_CHECKING:
    from torch import Tensor

MOST_COLUMNS = 64
"""Most columns of a block."""
_ROWS = 8
"""Rows of a program, which is one warp: 768 rows give work to 96 of the 132 SMs of a Hopper."""
_INT4_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23


def round_columns(
    element: str, target: Tensor, scale: Tensor, codes: Tensor, errors: Tensor, feedback: Tensor
) -> None:
    """Round a block of columns one after the other, on the current stream of their device.

    The first call for an element and a device compiles, and must be over before other threads call.

    Args:
        element: what a code is: "e2m1", "e4m3" or "int4".
        target: [B, N] float64 contiguous, with the errors of earlier blocks added; only read. B is
            at most MOST_COLUMNS.
        scale: [B, N] float64 contiguous.
        codes: [B, N] uint8 contiguous, written, one code in each byte.
        errors: [B, N] float64 contiguous; the columns of the weight, from which what they are
            rounded to is subtracted.
        feedback: [B, B] float64 of any strides, how much of the error of a column (second index) is
            added to one that follows (first index).
    """
    B, N = target.shape
    assert B <= MOST_COLUMNS, B
    if target.numel() == 0:
        return
    with on(target.device):
        launch(
            round_block,
            (triton.cdiv(N, _ROWS),),
            target,
            scale,
            codes,
            errors,
            feedback,
            *feedback.stride(),
            B,
            N,
            ELEMENT=element,
            COLUMNS=MOST_COLUMNS,
            ROWS=_ROWS,
            enable_fp_fusion=False,
            num_warps=1,
            overlap=False,
        )


@triton.jit(do_not_specialize=["to_stride", "from_stride", "B", "N"])
def round_block(
    target,
    scale,
    codes,
    errors,
    feedback,
    to_stride,
    from_stride,
    B,
    N,
    ELEMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS rows, which lie side by side in memory, of B columns."""
    column = tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < N
    at = column[:, None] * N + row[None, :]
    left = tl.load(target + at, mask=(column < B)[:, None] & there[None, :], other=0.0)
    steps, w, factor = of_column(
        0, scale, errors, feedback, to_stride, from_stride, B, N, column, row
    )
    for k in range(B):
        after = of_column(
            tl.minimum(k + 1, B - 1),
            scale, errors, feedback, to_stride, from_stride, B, N, column, row,
        )  # fmt: skip
        # Bits, because a sum of zeros would lose the sign of -0.
        bits = tl.where((column == k)[:, None], left.to(tl.int64, bitcast=True), 0)
        x = tl.sum(bits, 0).to(tl.float64, bitcast=True)
        code = encode((x / steps).to(tl.float32), ELEMENT)
        error = w - decode(code, ELEMENT).to(tl.float64) * steps
        tl.store(codes + k * N + row, code, mask=there)
        tl.store(errors + k * N + row, error, mask=there)
        # Columns before it, and itself, are done: what is added to them is not read again.
        left += factor[:, None] * error[None, :]
        steps, w, factor = after


@triton.jit
def of_column(k, scale, errors, feedback, to_stride, from_stride, B, N, column, row):
    """Scale and weight of column `k`, [ROWS], and what of its error goes to others, [COLUMNS]."""
    there = row < N
    steps = tl.load(scale + k * N + row, mask=there, other=1.0)
    w = tl.load(errors + k * N + row, mask=there, other=0.0)
    factor = tl.load(feedback + column * to_stride + k * from_stride, mask=column < B, other=0.0)
    return steps, w, factor


@triton.jit
def encode(x, ELEMENT: tl.constexpr):
    """float32 to the nearest code, ties to even, saturating: uint8."""
    bits = x.to(tl.int32, bitcast=True)
    if ELEMENT == "e4m3":
        code = encode_e4m3_bits(x)
    elif ELEMENT == "e2m1":
        code = ((encode_e2m1(x, True).to(tl.int32) & 7) | ((bits >> 28) & 8)).to(tl.uint8)
    else:
        tl.static_assert(ELEMENT == "int4")
        # Rounded by the sum, whose last bits are two's complement.
        rounded = tl.minimum(tl.maximum(x, -8.0), 7.0) + _INT4_ROUNDER
        code = (rounded.to(tl.int32, bitcast=True) & 15).to(tl.uint8)
    return code


@triton.jit
def decode(code, ELEMENT: tl.constexpr):
    """uint8 to float32, exact."""
    if ELEMENT == "e4m3":
        value = decode_e4m3(code, False)
    elif ELEMENT == "e2m1":
        value = decode_e2m1(code)
    else:
        value = decode_int4(code)
    return value
