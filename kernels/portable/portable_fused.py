"""The experts of a layer: from hidden states and a routing to output, in five launches or so.

sort             the routing, compact rows
quantize         each token once, unless activations stay as they are
gate and up      grouped GEMM that gathers its rows; activation function, quantization to groups
quantize         the rows, where a scale is a whole row's
down             grouped GEMM
weighted reduce  per token, float32, in the order of its slots
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.calls import part_tokens, run_in_parts
from moequant.kernels.portable.portable_grouped_gemm import Rows, Work, grouped_gemm
from moequant.kernels.portable.quantize import quantize_rows
from moequant.kernels.routing import ONE_LAUNCH_SLOTS, Grouping, chunk_of, max_rows, sort_routing
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from moequant.kernels.portable.weights import Experts

TILE_ROWS = (16, 32, 64)


def fused_experts(
    experts: Experts,
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    out: Tensor,
    workspace: Tensor,
    expert_map: Tensor | None = None,
    hidden_scale: Tensor | None = None,
) -> None:
    """Run the experts once. Nothing is read on the host, and nothing kept but compiled kernels.

    For hidden states in bfloat16 or FP8, what lies between the GEMMs and is not quantized is
    rounded to bfloat16, and so is each expert's result; for others both are float32. Sums over a
    token's experts are float32.

    Args:
        experts: the experts here.
        hidden: [M, H] bfloat16, float16 or float32, multiplied as they are if not quantized.
        topk_weights: [M, T] float32, bfloat16 or float16.
        topk_ids: [M, T] int32 or int64; an id that is no expert's, such as -1, contributes nothing.
        out: [M, H] contiguous bfloat16, float16 or float32, written.
        workspace: uint8, at least `workspace_bytes`, with any contents.
        expert_map: [global experts] int32 or int64, index here or -1.
        hidden_scale: where `hidden` is quantized by `experts.activations`, float8_e4m3fn, its
            scales: float32 [M, ceil(H / 128)] or [M, 1].
    """
    T = topk_ids.shape[1]
    dtype = hidden.dtype
    if hidden_scale is not None:
        hidden, dtype = hidden.view(torch.uint8), torch.bfloat16

    def plan_for(tokens: int) -> PortablePlan:
        return PortablePlan(experts, tokens, T, dtype=dtype, arena=WorkspaceArena(workspace))

    run_in_parts(
        plan_for,
        hidden,
        topk_weights,
        topk_ids,
        out=out,
        expert_map=expert_map,
        hidden_scale=hidden_scale,
    )


def workspace_bytes(experts: Experts, tokens: int, topk: int, dtype: torch.dtype) -> int:
    """Scratch memory of a call of [tokens, topk] slots; float32 hidden states take most."""
    arena = WorkspaceArena()
    PortablePlan(experts, part_tokens(tokens, topk), topk, dtype=dtype, arena=arena)
    return arena.size_bytes


def kernels_for(experts: Experts, tokens: int, topk: int) -> Hashable:
    """Equal for calls that run the same kernels.

    Those of the sort and of the reduction are compiled for powers of two of the slots, for the
    upper half of what can be sorted, and apart for numbers of slots that are multiples of 16.
    """
    tokens = part_tokens(tokens, topk)
    slots = tokens * topk
    sort = (slots - 1).bit_length() if slots <= ONE_LAUNCH_SLOTS else chunk_of(slots)
    tile_rows = likely_rows(slots / max(experts.experts, 1))
    return tile_rows, sort, slots % 16 == 0, slots == 1, tokens <= 64, topk


class PortablePlan:
    """Buffers for calls of exactly `tokens` tokens with `topk` slots each.

    Args:
        experts: the experts here.
        tokens: M.
        topk: T.
        dtype: of the hidden states.
        arena: where buffers come from.
        tile_rows: one of TILE_ROWS; by default what nearly all experts fit in, routed uniformly.
    """

    def __init__(
        self,
        experts: Experts,
        tokens: int,
        topk: int,
        *,
        dtype: torch.dtype,
        arena: WorkspaceArena,
        tile_rows: int | None = None,
    ) -> None:
        self.experts, self.topk = experts, topk
        E, H = experts.experts, experts.hidden
        self.slots = tokens * topk
        rows = max_rows(self.slots, E, 1)
        tile_rows = tile_rows or likely_rows(self.slots / max(E, 1))
        self.grouping = Grouping(experts=E, tile_rows=tile_rows)
        self.routing = arena.sorted_routing(self.slots, self.grouping)
        self.work = Work(
            tile_rows=tile_rows,
            max_tiles=self.routing.tiles.shape[0],
            count=self.routing.tile_count,
            tiles=self.routing.tiles,
        )
        between = between_dtype(dtype)
        self.x = None
        if experts.activations != "none":
            self.x = Rows.empty(experts.activations, tokens, H, dtype=dtype, arena=arena)
        self.middle = Middle(experts, rows, between, arena)
        self.y = Rows.empty("none", rows, H, dtype=between, arena=arena)

    def __call__(
        self,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> None:
        """Run the experts.

        Args:
            hidden: [M, H] contiguous, of the plan's dtype; uint8 codes with a `hidden_scale`.
            topk_weights: [M, T] contiguous float32, bfloat16 or float16.
            topk_ids: [M, T] contiguous int32 or int64.
            out: [M, H] contiguous bfloat16, float16 or float32, written.
            expert_map: [global experts] int32 or int64, index here or -1.
            hidden_scale: see `fused_experts`; contiguous.
        """
        routing = self.routing
        sort_routing(topk_ids, routing, self.grouping, expert_map=expert_map)
        x = Rows(scheme="none", qdata=hidden, scale=None)
        if hidden_scale is not None:
            x = Rows(scheme=self.experts.activations, qdata=hidden, scale=hidden_scale)
        elif self.x is not None:
            quantize_rows(hidden, self.x, static=self.experts.up_static)
            x = self.x
        middle = self.middle(
            x,
            self.work,
            slot_of_row=routing.slot_of_row,
            topk=self.topk,
            row_of_slot=routing.row_of_slot,
        )
        grouped_gemm(middle, self.work, self.experts.down, self.y)
        weighted_reduce(self.y.qdata, routing.row_of_slot, topk_weights, out)


class Middle:
    """The first GEMM with what follows it, and the buffers of its result."""

    def __init__(
        self, experts: Experts, rows: int, between: torch.dtype, arena: WorkspaceArena
    ) -> None:
        self.experts = experts
        I, scheme = experts.intermediate, experts.activations
        self.out = Rows.empty(scheme, rows, I, dtype=between, arena=arena)
        self.values = None
        if scheme == "fp8_token":
            self.values = Rows.empty("none", rows, I, dtype=torch.float32, arena=arena)

    def __call__(
        self,
        x: Rows,
        work: Work,
        *,
        slot_of_row: Tensor | None = None,
        topk: int = 1,
        row_of_slot: Tensor | None = None,
    ) -> Rows:
        """act_fn(gate(x), up(x)) of the rows of each expert, quantized as `x` is.

        Args:
            x: the activations.
            work: the rows of each expert.
            slot_of_row: see `grouped_gemm`.
            topk: see `grouped_gemm`.
            row_of_slot: [slots] int32, the rows of the work; None for a batched one.
        """
        w = self.experts
        out = self.out if self.values is None else self.values
        grouped_gemm(
            x, work, w.up, out, act=w.act_fn, gate=w.gate, slot_of_row=slot_of_row, topk=topk
        )
        if self.values is not None:
            quantize_rows(
                self.values.qdata,
                self.out,
                row_of_slot=row_of_slot,
                counts=work.count if row_of_slot is None else None,
                capacity=work.capacity,
                static=w.down_static,
            )
        return self.out


def between_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of what is not quantized between and behind the GEMMs, for hidden states of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def likely_rows(mean: float) -> int:
    """The tile that nearly all experts fit in, for `mean` rows an expert: mean + 2 sigma."""
    likely = mean + 2 * mean**0.5
    return next((rows for rows in TILE_ROWS if likely <= rows), TILE_ROWS[-1])
