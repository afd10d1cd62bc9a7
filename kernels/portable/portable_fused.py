"""The experts of a layer: from hidden states and a routing to output, in five launches or so.

sort             the routing, compact rows
quantize         each token once, unless activations stay as they are; if all share a scale, two
                 launches find it before, here and below
gate and up      grouped GEMM that gathers its rows; activation function, quantization to groups
quantize         the rows, where a scale is a whole row's
down             grouped GEMM
weighted reduce  per token, float32, in the order of its experts

For hidden states in bfloat16 or FP8, what lies between the GEMMs and is not quantized is rounded to
bfloat16, and so is each expert's result; for others both are float32. Nothing is read on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.calls import on, part_tokens
from moequant.kernels.kernel_sets import around_gemms
from moequant.kernels.portable.portable_grouped_gemm import Rows, Work, grouped_gemm
from moequant.kernels.portable.quantize import quantize_rows
from moequant.kernels.routing import (
    Grouping,
    SortedRouting,
    likely_tile_rows,
    max_rows,
    sort_routing,
)
from moequant.kernels.tensor_scale import TensorScale
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from moequant.kernels.portable.weights import Experts

TILE_ROWS = (16, 32, 64)


def kernels_for(experts: Experts, tokens: int, topk: int) -> Hashable:
    """Equal for calls that run the same kernels, see `PackedExperts.kernels_for`."""
    pairs = part_tokens(tokens, topk) * topk
    tile_rows = likely_tile_rows(pairs / max(experts.experts, 1), TILE_ROWS)
    return tile_rows, around_gemms(tokens, topk)


class PortablePlan:
    """Buffers for calls of exactly `tokens` tokens with `topk` experts each.

    Args:
        experts: the experts here.
        tokens: M.
        topk: T.
        arena: where buffers come from.
        dtype: of the hidden states; float8_e4m3fn where they come quantized.
        tile_rows: one of TILE_ROWS; by default what nearly all experts fit in, routed uniformly.
    """

    def __init__(
        self,
        experts: Experts,
        tokens: int,
        topk: int,
        arena: WorkspaceArena,
        dtype: torch.dtype,
        *,
        tile_rows: int | None = None,
    ) -> None:
        self.experts, self.topk = experts, topk
        E, H = experts.experts, experts.hidden
        pairs = tokens * topk
        rows = max_rows(pairs, E, 1)
        tile_rows = tile_rows or likely_tile_rows(pairs / max(E, 1), TILE_ROWS)
        self.grouping = Grouping(experts=E, tile_rows=tile_rows)
        self.routing = SortedRouting.allocate(pairs, self.grouping, empty=arena.empty)
        self.work = Work(
            tile_rows=tile_rows,
            max_tiles=self.routing.tiles.shape[0],
            count=self.routing.tile_count,
            tiles=self.routing.tiles,
        )
        between = between_dtype(dtype)
        self.x = None
        if experts.activations != "none":
            self.x = Rows.allocate(experts.activations, tokens, H, dtype=between, empty=arena.empty)
        self.scale = TensorScale.allocate(empty=arena.empty) if experts.tensor_scale else None
        self.middle = Middle(experts, rows, between, arena)
        self.y = Rows.allocate("none", rows, H, dtype=between, empty=arena.empty)

    def __call__(
        self,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> None:
        """Run the experts; see `PackedExperts.run`. All tensors are contiguous."""
        routing = self.routing
        sort_routing(topk_ids, routing, self.grouping, expert_map=expert_map)
        x = Rows(scheme="none", qdata=hidden, scale=None)
        if hidden_scale is not None:
            codes = hidden.view(torch.uint8)
            x = Rows(scheme=self.experts.activations, qdata=codes, scale=hidden_scale)
        elif self.x is not None:
            static = self.experts.up_static
            if self.scale is not None:
                static = self.scale.find(hidden)
            quantize_rows(hidden, self.x, static=static)
            x = self.x
        middle = self.middle(
            x,
            self.work,
            pair_of_row=routing.pair_of_row,
            topk=self.topk,
            row_of_pair=routing.row_of_pair,
        )
        grouped_gemm(middle, self.work, self.experts.down, self.y)
        weighted_reduce(self.y.qdata, routing.row_of_pair, topk_weights, out)


class Middle:
    """The first GEMM with what follows it, and the buffers of its result."""

    def __init__(
        self, experts: Experts, rows: int, between: torch.dtype, arena: WorkspaceArena
    ) -> None:
        self.experts = experts
        I, scheme = experts.intermediate, experts.activations
        self.out = Rows.allocate(scheme, rows, I, dtype=between, empty=arena.empty)
        self.values = None
        if scheme == "fp8_token":
            self.values = Rows.allocate("none", rows, I, dtype=torch.float32, empty=arena.empty)
        self.scale = TensorScale.allocate(empty=arena.empty) if experts.tensor_scale else None

    def __call__(
        self,
        x: Rows,
        work: Work,
        *,
        pair_of_row: Tensor | None = None,
        topk: int = 1,
        row_of_pair: Tensor | None = None,
    ) -> Rows:
        """act_fn(gate(x), up(x)) of the rows of each expert, quantized as `x` is.

        Args:
            x: the activations.
            work: the rows of each expert.
            pair_of_row: see `grouped_gemm`.
            topk: see `grouped_gemm`.
            row_of_pair: [M * T] int32, the rows of the work; None for a batched one.
        """
        w = self.experts
        out = self.out if self.values is None else self.values
        grouped_gemm(
            x, work, w.up, out, act=w.act_fn, gate=w.gate, pair_of_row=pair_of_row, topk=topk
        )
        if self.values is not None:
            values, static = self.values.qdata, w.down_static
            used: dict[str, Any] = {"row_of_pair": row_of_pair}
            if row_of_pair is None:
                used = {"counts": work.count, "capacity": work.capacity}
            if self.scale is not None:
                static = self.scale.find(values, **used)
            quantize_rows(values, self.out, static=static, **used)
        return self.out


def batched_experts(
    experts: Experts, qdata: Tensor, scale: Tensor | None, counts: Tensor
) -> Tensor:
    """Every expert's result for the first counts[e] of its tokens.

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
    dtype = between_dtype(qdata.dtype)
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


def between_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of what is not quantized between and behind the GEMMs, for hidden states of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.float32) else torch.bfloat16
