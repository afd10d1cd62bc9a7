"""act_fn(gate, up) of a GEMM's output, not quantized; for quantizers that read rows.

gate_up  bfloat16  [rows, 2 * I], gate then up; [rows, I], up alone, where there is no gate
bias     float32   likewise for each expert, added to that; or None
out      float32   [rows, I]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.launch import launch, overlaps_launches, wait_for_inputs
from moequant.kernels.portable.act_fn import activated, constants_of
from moequant.kernels.weighted_reduce import expert_of_row

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.act_fn import ActFn

_BLOCK = 1024


def act_rows(
    gate_up: Tensor,
    out: Tensor,
    act: ActFn,
    row_of_pair: Tensor,
    *,
    bias: Tensor | None = None,
    row_end: Tensor | None = None,
) -> None:
    """Compute the rows in use; others are not written.

    Args:
        gate_up: [rows, 2 * I] contiguous bfloat16; [rows, I] where `act` is not gated.
        out: float32 [rows, I] contiguous, written.
        act: the function.
        row_of_pair: [M * T] int32, the rows in use, -1 for none.
        bias: float32 [E, columns of gate_up] contiguous.
        row_end: with a bias, [E] int32, the row behind the last of each expert.
    """
    pairs, I = row_of_pair.shape[0], out.shape[1]
    E = 0 if row_end is None else row_end.shape[0]
    if pairs == 0:
        return
    block = min(triton.next_power_of_2(I), _BLOCK)
    overlap = overlaps_launches(gate_up.device)
    launch(
        act_of_pair,
        (pairs, triton.cdiv(I, block)),
        gate_up,
        out,
        row_of_pair,
        row_of_pair if row_end is None else row_end,
        row_of_pair if bias is None else bias,
        I=I,
        E=E,
        E_PAD=triton.next_power_of_2(max(E, 1)),
        **constants_of(act),
        BIAS=bias is not None,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=4,
        overlap=overlap,
    )


@triton.jit
def act_of_pair(
    gate_up,
    out,
    row_of_pair,
    row_end,
    bias,
    I: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of the row of one pair."""
    wait_for_inputs(OVERLAP)
    row = tl.load(row_of_pair + tl.program_id(0)).to(tl.int64)
    if row < 0:
        return
    COLUMNS: tl.constexpr = 2 * I if GATED else I
    gate_up += row * COLUMNS
    if BIAS:
        bias += expert_of_row(row, row_end, E, E_PAD) * COLUMNS
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < I
    y = activated(gate_up, bias, col, inside, I, ACT, GATED, BIAS, LIMIT, ALPHA, BETA, LINEAR_BETA)
    tl.store(out + row * I + col, y, mask=inside)
