"""The same experts over a batch of tokens each, as an expert-parallel dispatch leaves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.calls import on
from moequant.kernels.portable.portable_fused import TILE_ROWS, Middle, between_dtype
from moequant.kernels.portable.portable_grouped_gemm import Rows, Work, grouped_gemm

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.kernels.portable.weights import Experts


def batched_experts(
    experts: Experts, qdata: Tensor, scale: Tensor | None, counts: Tensor
) -> Tensor:
    """Every expert's result for the first counts[e] of its tokens. Nothing is read on the host.

    Args:
        experts: the E experts here.
        qdata: [E, C, H] contiguous, quantized by `experts.activations`: codes in uint8, or hidden
            states in bfloat16, float16 or float32.
        scale: float32 [E, C, groups] contiguous, None for "none".
        counts: [E] int32; more than C is C.

    Returns:
        [E, C, H], rows at or beyond counts[e] not written; bfloat16 where `qdata` holds codes or
        bfloat16, else float32.
    """
    E, C, H = qdata.shape
    dtype = torch.bfloat16 if qdata.dtype == torch.uint8 else between_dtype(qdata.dtype)
    y = torch.empty(E, C, H, dtype=dtype, device=qdata.device)
    if y.numel() == 0:
        return y
    tile_rows = next((rows for rows in TILE_ROWS if rows >= C), TILE_ROWS[-1])
    work = Work(tile_rows=tile_rows, max_tiles=E * -(-C // tile_rows), count=counts, capacity=C)
    x = Rows(
        scheme=experts.activations,
        qdata=qdata.reshape(E * C, H),
        scale=None if scale is None else scale.reshape(E * C, -1),
    )
    with on(qdata.device):
        size = WorkspaceArena()
        Middle(experts, E * C, dtype, size)
        memory = torch.empty(size.size_bytes, dtype=torch.uint8, device=qdata.device)
        middle = Middle(experts, E * C, dtype, WorkspaceArena(memory))(x, work)
        out = Rows(scheme="none", qdata=y.reshape(E * C, H), scale=None)
        grouped_gemm(middle, work, experts.down, out)
    return y
