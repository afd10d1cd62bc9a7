"""Weight the experts' rows and add them up per token, in float32, slot after slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.launch import launch, overlaps_launches, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS = ((64, 256), (1 << 62, 1024))


def weighted_reduce(rows: Tensor, row_of_slot: Tensor, topk_weights: Tensor, out: Tensor) -> None:
    """Sum over a token's slots t of `topk_weights[m, t] * rows[row_of_slot[m * T + t]]`.

    Args:
        rows: [rows, H] contiguous, bfloat16 or float32.
        row_of_slot: [M * T] int32, -1 for a slot that adds nothing.
        topk_weights: [M, T] contiguous, float32 or bfloat16.
        out: [M, H] contiguous, written.
    """
    tokens, H = out.shape
    if tokens == 0:
        return
    block = next(block for most, block in _BLOCKS if tokens <= most)
    launch(
        reduce_tokens,
        (tokens, -(-H // block)),
        rows,
        row_of_slot,
        topk_weights,
        out,
        H=H,
        TOPK=topk_weights.shape[1],
        BLOCK=block,
        OVERLAP=(overlap := overlaps_launches(out.device)),
        num_warps=4 if block > 256 else 2,
        overlap=overlap,
    )


@triton.jit
def reduce_tokens(
    rows,
    row_of_slot,
    topk_weights,
    out,
    H: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for t in tl.static_range(TOPK):
        row = tl.load(row_of_slot + token * TOPK + t).to(tl.int64)
        weight = tl.load(topk_weights + token * TOPK + t).to(tl.float32)
        x = tl.load(rows + row * H + col, mask=col < tl.where(row >= 0, H, 0), other=0.0)
        total += tl.where(row >= 0, weight, 0.0) * x.to(tl.float32)
    tl.store(out + token * H + col, total, mask=col < H)
