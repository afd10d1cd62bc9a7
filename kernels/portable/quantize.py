"""Quantize rows of activations to FP8, as `moequant.runtime.activations` defines it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.fp8_codes import scale_of
from moequant.kernels.launch import launch, overlaps_launches, wait_for_inputs
from moequant.kernels.portable.codes import encode_e4m3_byte
from moequant.kernels.portable.portable_grouped_gemm import has_native_e4m3

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.kernels.portable.portable_grouped_gemm import Rows

_BLOCK = 2048
_WARPS = 8


def quantize_rows(
    x: Tensor,
    out: Rows,
    *,
    row_of_pair: Tensor | None = None,
    counts: Tensor | None = None,
    capacity: int = 0,
    static: Tensor | None = None,
) -> None:
    """Quantize every row of `x`, or those that are used.

    Args:
        x: [R, K] contiguous, bfloat16, float16 or float32.
        out: [R, K], "fp8_group128" or "fp8_token"; rows that are not used are not written.
        row_of_pair: [pairs] int32; the rows that are used, -1 for none.
        counts: [E] int32; rows e * capacity to e * capacity + counts[e] are used.
        capacity: see `counts`.
        static: float32 [1], the scale of all rows, for "fp8_token"; None, and it is computed.
    """
    programs = x.shape[0] if row_of_pair is None else row_of_pair.shape[0]
    if programs == 0:
        return
    overlap = overlaps_launches(x.device)
    launch(
        quantize_row,
        (programs,),
        x,
        out.qdata,
        out.scale,
        x if row_of_pair is None else row_of_pair,
        x if counts is None else counts,
        x if static is None else static,
        capacity,
        K=x.shape[1],
        GROUPED=out.scheme == "fp8_group128",
        STATIC=static is not None,
        SORTED=row_of_pair is not None,
        BATCHED=counts is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(max(x.shape[1], 128))),
        NATIVE=has_native_e4m3(x.device),
        OVERLAP=overlap,
        num_warps=_WARPS,
        overlap=overlap,
    )


@triton.jit(do_not_specialize=["capacity"])
def quantize_row(
    x,
    codes,
    scale,
    row_of_pair,
    counts,
    static,
    capacity,
    K: tl.constexpr,
    GROUPED: tl.constexpr,
    STATIC: tl.constexpr,
    SORTED: tl.constexpr,
    BATCHED: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one row."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if SORTED:
        row = tl.load(row_of_pair + row).to(tl.int64)
        if row < 0:
            return
    if BATCHED and row % capacity >= tl.load(counts + row // capacity):
        return
    GROUPS: tl.constexpr = BLOCK // 128
    amax = tl.zeros([GROUPS], tl.float32)
    if STATIC:
        tl.store(scale + row, tl.load(static))
    elif not GROUPED:
        for first in range(0, K, BLOCK):
            amax = tl.maximum(amax, tl.max(tl.abs(groups_of(x, row, first, K, GROUPS)), 1))
        # A scalar, given to every group.
        amax = tl.zeros([GROUPS], tl.float32) + tl.max(amax, 0)
        tl.store(scale + row, tl.max(scale_of(amax), 0))
    for first in range(0, K, BLOCK):
        value = groups_of(x, row, first, K, GROUPS)
        if GROUPED:
            amax = tl.max(tl.abs(value), 1)
            group = first // 128 + tl.arange(0, GROUPS)
            to = scale + row * tl.cdiv(K, 128) + group
            tl.store(to, scale_of(amax), mask=group < tl.cdiv(K, 128))
        row_scale = scale_of(amax)
        if STATIC:
            row_scale = tl.zeros([GROUPS], tl.float32) + tl.load(static)
        code = encode_e4m3_byte(tl.math.div_rn(value, row_scale[:, None]), NATIVE)
        col = first + tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(codes + row * K + col, code, mask=col < K)


@triton.jit
def groups_of(x, row, first, K: tl.constexpr, GROUPS: tl.constexpr):
    """GROUPS groups of 128 columns from `first` on, float32; 0 beyond the last column."""
    col = first + tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    return tl.load(x + row * K + col, mask=col < K, other=0.0).to(tl.float32)
