"""Weight the experts' rows and add them up per token, in float32, pair after pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.launch import launch, overlaps_launches, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.kernels.launch import Relaunch

_BLOCKS = ((64, 256), (1 << 62, 1024))
"""Up to so many tokens, a program adds up so many columns."""


def weighted_reduce(
    rows: Tensor,
    row_of_pair: Tensor,
    topk_weights: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    row_end: Tensor | None = None,
) -> Relaunch | None:
    """Sum over a token's pairs t of `topk_weights[m, t] * rows[row_of_pair[m * T + t]]`.

    Args:
        rows: [rows, H] contiguous, bfloat16 or float32.
        row_of_pair: [M * T] int32, -1 for a pair that adds nothing.
        topk_weights: [M, T] contiguous, float32, bfloat16 or float16.
        out: [M, H] contiguous, written.
        bias: [E, H] contiguous, float32 or bfloat16, added to the rows of each expert.
        row_end: with a bias, [E] int32, the row behind the last of each expert.

    Returns:
        See `launch`; the first arguments are `rows`, `row_of_pair`, `topk_weights` and `out`.
    """
    tokens, H = out.shape
    if tokens == 0:
        return None
    block = block_of(tokens)
    overlap = overlaps_launches(out.device)
    if bias is None or row_end is None:
        bias, row_end, E = rows, row_of_pair, 0  # of which nothing is read
    else:
        E = row_end.shape[0]
    return launch(
        reduce_tokens,
        (tokens, -(-H // block)),
        rows,
        row_of_pair,
        topk_weights,
        out,
        bias,
        row_end,
        E=E,
        E_PAD=triton.next_power_of_2(max(E, 1)),
        H=H,
        TOPK=topk_weights.shape[1],
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=4 if block > 256 else 2,
        overlap=overlap,
    )


def block_of(tokens: int) -> int:
    """Columns that a program adds up in a call of `tokens` tokens: a constant of the kernel."""
    return next(block for most, block in _BLOCKS if tokens <= most)


@triton.jit
def reduce_tokens(
    rows,
    row_of_pair,
    topk_weights,
    out,
    bias,
    row_end,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    H: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of one token; with a bias where E is not 0."""
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for t in tl.static_range(TOPK):
        row = tl.load(row_of_pair + token * TOPK + t).to(tl.int64)
        weight = tl.load(topk_weights + token * TOPK + t).to(tl.float32)
        inside = col < tl.where(row >= 0, H, 0)
        x = tl.load(rows + row * H + col, mask=inside, other=0.0).to(tl.float32)
        if E > 0:
            expert = expert_of_row(row, row_end, E, E_PAD)
            x += tl.load(bias + expert * H + col, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(row >= 0, weight, 0.0) * x
    tl.store(out + token * H + col, total, mask=col < H)


@triton.jit
def expert_of_row(row, row_end, E: tl.constexpr, E_PAD: tl.constexpr):
    """The expert of a row, int64: as many as end at or before it, gaps between them or not."""
    e = tl.arange(0, E_PAD)
    end = tl.load(row_end + e, mask=e < E, other=2147483647)
    return tl.sum((end <= row).to(tl.int64), 0)
