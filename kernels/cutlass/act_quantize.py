"""act_fn(gate, up) of a GEMM's output, quantized again with one scale a row.

gate_up  bfloat16       [rows, 2 * I], gate then up; [rows, I], up alone, where there is no gate
codes    float8_e4m3fn  [rows, I]
scale    float32        [rows], amax / 448, and 1 where that is 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.fp8_codes import encode_e4m3, scale_of
from moequant.kernels.launch import INTERPRETED, launch, overlaps_launches, wait_for_inputs
from moequant.kernels.portable.act_fn import activated, constants_of

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.act_fn import ActFn

_BLOCK = 4096


def act_quantize(
    gate_up: Tensor,
    codes: Tensor,
    scale: Tensor,
    act: ActFn,
    *,
    row_of_pair: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Quantize act(gate, up) for the rows in use; others are not written.

    Args:
        gate_up: [rows, 2 * I] contiguous bfloat16; [rows, I] where `act` is not gated.
        codes: float8_e4m3fn [rows, I] contiguous, written.
        scale: float32 [rows], written.
        act: the function.
        row_of_pair: [M * T] int32, the rows in use, -1 for none; None for batches.
        counts: of batches of rows / E rows, [E] int32, how many rows of each are in use.
    """
    used = counts if row_of_pair is None else row_of_pair
    assert used is not None
    rows, I = codes.shape
    programs = rows if row_of_pair is None else row_of_pair.shape[0]
    if programs == 0:
        return
    overlap = overlaps_launches(gate_up.device)
    launch(
        act_quantize_row,
        (programs,),
        gate_up,
        codes,
        scale,
        used,
        rows // used.shape[0],
        I=I,
        **constants_of(act),
        BATCHED=row_of_pair is None,
        BLOCK=min(triton.next_power_of_2(I), _BLOCK),
        NATIVE=not INTERPRETED,
        OVERLAP=overlap,
        num_warps=8 if I > 1024 else 4,
        overlap=overlap,
    )


@triton.jit
def act_quantize_row(
    gate_up,
    codes,
    scale,
    used,
    capacity,
    I: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    BATCHED: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one row. Where a row has several blocks, their values are computed twice."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if BATCHED:
        if row % capacity >= tl.load(used + row // capacity):
            return
    else:
        row = tl.load(used + row).to(tl.int64)
        if row < 0:
            return
    gate_up += row * (2 * I if GATED else I)
    amax = 0.0
    for first in tl.static_range(0, I, BLOCK):
        col = first + tl.arange(0, BLOCK)
        y = activated(
            gate_up, gate_up, col, col < I, I, ACT, GATED, False, LIMIT, ALPHA, BETA, LINEAR_BETA
        )
        amax = tl.maximum(amax, tl.max(tl.abs(y), 0))
    row_scale = scale_of(amax)
    for first in tl.static_range(0, I, BLOCK):
        col = first + tl.arange(0, BLOCK)
        y = activated(
            gate_up, gate_up, col, col < I, I, ACT, GATED, False, LIMIT, ALPHA, BETA, LINEAR_BETA
        )
        code = encode_e4m3(tl.math.div_rn(y, tl.zeros([BLOCK], tl.float32) + row_scale), NATIVE)
        tl.store(codes + row * I + col, code, mask=col < I)
    tl.store(scale + row, row_scale)
