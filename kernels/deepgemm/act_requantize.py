"""act_fn(gate, up) of a GEMM's output, quantized again, for GEMMs without that epilogue.

gate_up  bfloat16       [rows, 2 * Ip], gate then up; [rows, Ip], up alone, where there is no gate
bias     float32        likewise for each expert, added to that; or None
rows     float8_e4m3fn  [rows, I], I at most Ip
scale    float32        scale[b, g, r] of row r of batch b and columns 128 g on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.fp8_codes import quantize_groups
from moequant.kernels.launch import INTERPRETED, launch, overlaps_launches, wait_for_inputs
from moequant.kernels.portable.act_fn import activated, constants_of
from moequant.kernels.weighted_reduce import expert_of_row

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.act_fn import ActFn

_GROUPS_A_PROGRAM = 16


def act_requantize(
    gate_up: Tensor,
    rows: Tensor,
    scale: Tensor,
    act: ActFn,
    *,
    row_of_pair: Tensor | None = None,
    counts: Tensor | None = None,
    bias: Tensor | None = None,
    row_end: Tensor | None = None,
) -> None:
    """Quantize act(gate, up) for the rows in use; others are not written.

    Args:
        gate_up: [rows, 2 * Ip] contiguous bfloat16; [rows, Ip] where `act` is not gated. Of
            batches, [E, C, ...].
        rows: float8_e4m3fn [rows, I] or [E, C, I] contiguous, written.
        scale: float32 [ceil(I / 128), row stride] or [E, ceil(I / 128), C], written.
        act: the function.
        row_of_pair: [M * T] int32, the rows in use, -1 for none; None for batches.
        counts: of batches, [E] int32, how many rows of each expert are in use.
        bias: float32 [E, columns of gate_up] contiguous.
        row_end: with a bias and `row_of_pair`, [E] int32, the row behind the last of each expert.
    """
    used = counts if row_of_pair is None else row_of_pair
    assert used is not None
    programs = used.shape[0] if counts is None else rows.shape[0] * rows.shape[1]
    if programs == 0:
        return
    overlap = overlaps_launches(gate_up.device)
    I = rows.shape[-1]
    E = 0 if row_end is None else row_end.shape[0]
    launch(
        act_requantize_rows,
        (programs, triton.cdiv(I, 128 * _GROUPS_A_PROGRAM)),
        gate_up,
        rows,
        scale,
        used,
        used if bias is None else bias,
        used if row_end is None else row_end,
        rows.shape[-2],
        scale.stride(-2),
        I=I,
        IP=gate_up.shape[-1] // (2 if act.gated else 1),
        E=E,
        E_PAD=triton.next_power_of_2(max(E, 1)),
        **constants_of(act),
        BIAS=bias is not None,
        BATCHED=counts is not None,
        GROUPS=_GROUPS_A_PROGRAM,
        NATIVE=not INTERPRETED,
        OVERLAP=overlap,
        num_warps=4,
        overlap=overlap,
    )


@triton.jit(do_not_specialize=["capacity"])
def act_requantize_rows(
    gate_up,
    rows,
    scale,
    used,
    bias,
    row_end,
    capacity,
    scale_stride,
    I: tl.constexpr,
    IP: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BATCHED: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: GROUPS groups of the row of a token-expert pair, or of one row of a batch."""
    wait_for_inputs(OVERLAP)
    COLUMNS: tl.constexpr = 2 * IP if GATED else IP
    expert = 0
    if BATCHED:
        row = tl.program_id(0).to(tl.int64)
        expert = row // capacity
        if row % capacity >= tl.load(used + expert):
            return
        scale += expert * tl.cdiv(I, 128) * scale_stride + row % capacity
    else:
        row = tl.load(used + tl.program_id(0)).to(tl.int64)
        if row < 0:
            return
        scale += row
        if BIAS:
            expert = expert_of_row(row, row_end, E, E_PAD)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = col < I
    gate_up += row * COLUMNS
    bias += expert * COLUMNS
    y = activated(gate_up, bias, col, inside, IP, ACT, GATED, BIAS, LIMIT, ALPHA, BETA, LINEAR_BETA)
    codes, group_scale = quantize_groups(y, NATIVE)
    tl.store(rows + row * I + col, codes, mask=inside)
    tl.store(scale + group * scale_stride, group_scale, mask=group * 128 < I)
