"""act_fn(gate, up) of a GEMM's output, quantized again, for GEMMs without that epilogue.

gate_up  bfloat16       [rows, 2 * Ip], gate then up
rows     float8_e4m3fn  [rows, I], I at most Ip
scale    float32        scale[b, g, r] of row r of batch b and columns 128 g on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.fp8_codes import quantize_groups
from moequant.kernels.launch import INTERPRETED, overlaps_launches, wait_for_inputs
from moequant.kernels.portable.act_fn import act_fn

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.kernels.portable.weights import Act

_GROUPS_A_PROGRAM = 16


def act_requantize(
    gate_up: Tensor, rows: Tensor, scale: Tensor, act: Act, *, row_of_slot: Tensor
) -> None:
    """Quantize act(gate, up) for the rows of the slots that have one.

    Args:
        gate_up: [rows, 2 * Ip] contiguous bfloat16.
        rows: float8_e4m3fn [rows, I] contiguous, written but for gaps.
        scale: float32 [ceil(I / 128), row stride], written but for gaps.
        act: a gated function.
        row_of_slot: [slots] int32, -1 for none.
    """
    _launch(row_of_slot.shape[0], gate_up, rows, scale, act, row_of_slot, 0, scale.stride(0))


def act_requantize_batched(
    gate_up: Tensor, rows: Tensor, scale: Tensor, act: Act, *, counts: Tensor
) -> None:
    """Quantize act(gate, up) for the first counts[e] rows of each expert e.

    Args:
        gate_up: [E, C, 2 * Ip] contiguous bfloat16.
        rows: float8_e4m3fn [E, C, I] contiguous, written but for rows beyond the counts.
        scale: float32 [E, ceil(I / 128), C] contiguous, likewise.
        act: a gated function.
        counts: [E] int32.
    """
    E, C, _ = gate_up.shape
    _launch(E * C, gate_up, rows, scale, act, counts, C, scale.stride(1))


def _launch(
    programs: int,
    gate_up: Tensor,
    rows: Tensor,
    scale: Tensor,
    act: Act,
    used: Tensor,
    capacity: int,
    scale_stride: int,
) -> None:
    if programs == 0:
        return
    overlap = overlaps_launches(gate_up.device)
    I = rows.shape[-1]
    act_requantize_rows[(programs, triton.cdiv(I, 128 * _GROUPS_A_PROGRAM))](
        gate_up,
        rows,
        scale,
        used,
        capacity,
        scale_stride,
        I=I,
        IP=gate_up.shape[-1] // 2,
        ACT=act.name,
        LIMIT=act.limit,
        ALPHA=act.alpha,
        BETA=act.beta,
        LINEAR_BETA=act.linear_beta,
        BATCHED=capacity > 0,
        GROUPS=_GROUPS_A_PROGRAM,
        NATIVE=not INTERPRETED,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


@triton.jit(do_not_specialize=["capacity"])
def act_requantize_rows(
    gate_up,
    rows,
    scale,
    used,
    capacity,
    scale_stride,
    I: tl.constexpr,
    IP: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BATCHED: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: GROUPS groups of a slot's row, or of one place of a batch."""
    wait_for_inputs(OVERLAP)
    if BATCHED:
        row = tl.program_id(0).to(tl.int64)
        if row % capacity >= tl.load(used + row // capacity):
            return
        scale += row // capacity * tl.cdiv(I, 128) * scale_stride + row % capacity
    else:
        row = tl.load(used + tl.program_id(0)).to(tl.int64)
        if row < 0:
            return
        scale += row
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    gate = tl.load(gate_up + row * 2 * IP + col, mask=col < I, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * IP + IP + col, mask=col < I, other=0.0).to(tl.float32)
    y = act_fn(gate, up, ACT, True, LIMIT, ALPHA, BETA, LINEAR_BETA)
    codes, group_scale = quantize_groups(y, NATIVE)
    tl.store(rows + row * I + col, codes, mask=col < I)
    tl.store(scale + group * scale_stride, group_scale, mask=group * 128 < I)
