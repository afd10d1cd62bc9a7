"""Tokens that are quantized already, copied to the rows of their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moequant.kernels.launch import overlaps_launches, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 2048


def copy_rows(
    qdata: Tensor, scale: Tensor, row_of_slot: Tensor, rows: Tensor, row_scale: Tensor
) -> None:
    """Copy each token to the row of each of its slots.

    Args:
        qdata: float8_e4m3fn [M, H] contiguous.
        scale: float32 [M, ceil(H / 128)] contiguous.
        row_of_slot: [M * T] int32, -1 for none.
        rows: float8_e4m3fn [rows, H] contiguous, written but for gaps.
        row_scale: float32 [ceil(H / 128), row stride], written but for gaps.
    """
    tokens, H = qdata.shape
    groups = scale.shape[1]
    overlap = overlaps_launches(qdata.device)
    copy_token[(tokens, triton.cdiv(H, _BLOCK))](
        qdata.view(torch.uint8),
        scale,
        row_of_slot,
        rows.view(torch.uint8),
        row_scale,
        row_scale.stride(0),
        H=H,
        GROUPS=groups,
        TOPK=row_of_slot.shape[0] // tokens,
        BLOCK=_BLOCK,
        GROUPS_PAD=triton.next_power_of_2(groups),
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


@triton.jit
def copy_token(
    qdata,
    scale,
    row_of_slot,
    rows,
    row_scale,
    scale_stride,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of a token; the first writes its scales too."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(qdata + token * H + col, mask=col < H, other=0)
    group = tl.arange(0, GROUPS_PAD)
    groups = tl.where(tl.program_id(1) == 0, GROUPS, 0)
    group_scale = tl.load(scale + token * GROUPS + group, mask=group < groups, other=0.0)
    for t in tl.static_range(TOPK):
        row = tl.load(row_of_slot + token * TOPK + t).to(tl.int64)
        tl.store(rows + row * H + col, codes, mask=col < tl.where(row >= 0, H, 0))
        to = row_scale + group * scale_stride + row
        tl.store(to, group_scale, mask=group < tl.where(row >= 0, groups, 0))
