"""Experts in FP4 whose activations `block_scaled_quantize` quantizes, around a grouped GEMM.

    sort             the pairs by expert; where the scales of their rows lie
    quantize         each pair's token, into the row of its expert
    gate and up      grouped GEMM
    act_rows         biases, the activation function
    quantize
    down             grouped GEMM
    weighted reduce  per token, float32, in the order of its experts

Results of both GEMMs are rounded to bfloat16. Nothing is read on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

import torch

from moequant.kernels.block_scaled_quantize import (
    BlockScaledRows,
    ScalePlaces,
    place_scales,
    quantize_sorted,
)
from moequant.kernels.calls import on
from moequant.kernels.cutlass.act_rows import act_rows
from moequant.kernels.cutlass.batch_places import place_batches
from moequant.kernels.routing import Grouping, SortedRouting, max_rows, sort_routing
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.arena import WorkspaceArena


class BlockScaledGemms(ABC):
    """Both GEMMs of rows in the order of their experts, with what goes in and lies between.

    Args:
        scheme: of activations: "nvfp4", "mxfp4" or "mxfp8".
        tensors: weights in FP4, `w13_qdata` and `w2_qdata` as the layout `stacked` has them. With
            `w13_input_scale` and `w2_input_scale`, the global scales of activations are these,
            else of each row.
        act_fn: the function between the GEMMs.
        rows: R, of all buffers.
        routing: where rows lie; written before a call.
        places: where the scales of these rows lie; likewise.
        empty: makes a tensor of a shape and `dtype`.
    """

    def __init__(
        self,
        scheme: str,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        rows: int,
        routing: SortedRouting,
        places: ScalePlaces,
        *,
        empty: Callable[..., Tensor],
    ) -> None:
        self.tensors, self.act_fn = tensors, act_fn
        self.routing, self.places = routing, places
        E, H, half = tensors["w2_qdata"].shape
        I = 2 * half  # two codes a byte
        self.x = BlockScaledRows.allocate(scheme, rows, H, E, empty=empty)
        self.gate_up = empty(rows, tensors["w13_qdata"].shape[1], dtype=torch.bfloat16)
        self.act = empty(rows, I, dtype=torch.float32)
        self.act_codes = BlockScaledRows.allocate(scheme, rows, I, E, empty=empty)
        self.y = empty(rows, H, dtype=torch.bfloat16)

    @abstractmethod
    def multiply(self, weight: str, x: BlockScaledRows, out: Tensor) -> None:
        """Multiply the rows of the routing by `weight`, "w13" or "w2", into bfloat16 `out`."""

    def __call__(self, hidden: Tensor, *, topk: int | None) -> Tensor:
        """Run them.

        Args:
            hidden: bfloat16, float16 or float32 contiguous: [M, H] of tokens with `topk`, or [R, H]
                of rows.
            topk: T, the pairs of a token.

        Returns:
            [R, H] bfloat16, not yet with biases of down; rows of no pair are anything.
        """
        routing = self.routing
        self._quantize(hidden, self.x, "w13", topk=topk)
        self.multiply("w13", self.x, self.gate_up)
        act_rows(
            self.gate_up,
            self.act,
            self.act_fn,
            routing.row_of_pair,
            bias=self.tensors.get("w13_bias"),
            row_end=routing.row_end,
        )
        self._quantize(self.act, self.act_codes, "w2", topk=None)
        self.multiply("w2", self.act_codes, self.y)
        return self.y

    def _quantize(self, x: Tensor, out: BlockScaledRows, of: str, *, topk: int | None) -> None:
        static = self.tensors.get(f"{of}_input_scale")
        if static is not None:
            static = static.expand(self.routing.row_end.shape[0]).contiguous()
        quantize_sorted(x, out, self.routing, self.places, topk=topk, static=static)


class BlockScaledPlan:
    """Buffers for calls of exactly `tokens` tokens with `topk` experts each, in `arena`.

    Args:
        gemms: makes the GEMMs from the last four arguments of `BlockScaledGemms`.
        grouping: how the rows of experts lie.
        bias: float32 [E, H] of down, or None.
        tokens: M, at least 1; M * T at most MAX_PAIRS.
        topk: T, at least 1.
        arena: where buffers come from.
    """

    def __init__(
        self,
        gemms: Callable[..., BlockScaledGemms],
        grouping: Grouping,
        bias: Tensor | None,
        tokens: int,
        topk: int,
        arena: WorkspaceArena,
    ) -> None:
        pairs, experts = tokens * topk, grouping.experts
        self.grouping, self.bias = grouping, bias
        self.routing = SortedRouting.allocate(pairs, grouping, empty=arena.empty)
        self.places = ScalePlaces.allocate(pairs, experts, empty=arena.empty)
        rows = max_rows(pairs, experts, grouping.alignment)
        self.gemms = gemms(rows, self.routing, self.places, empty=arena.empty)

    def __call__(
        self,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: None = None,
    ) -> None:
        """Run the experts; see `PackedExperts.run`. All tensors are contiguous."""
        routing, grouping = self.routing, self.grouping
        sort_routing(topk_ids, routing, grouping, expert_map=expert_map)
        place_scales(topk_ids, routing, self.places, grouping, expert_map=expert_map)
        weighted_reduce(
            self.gemms(hidden, topk=topk_ids.shape[1]),
            routing.row_of_pair,
            topk_weights,
            out,
            bias=self.bias,
            row_end=routing.row_end,
        )


def run_batches(
    gemms: Callable[..., BlockScaledGemms], bias: Tensor | None, hidden: Tensor, counts: Tensor
) -> Tensor:
    """Every expert's result for the first counts[e] of its tokens. Nothing is read on the host.

    Args:
        gemms: as for `BlockScaledPlan`.
        bias: float32 [E, H] of down, or None.
        hidden: [E, C, H] contiguous bfloat16, float16 or float32.
        counts: [E] int32, at least 0; more than C is C.

    Returns:
        [E, C, H] bfloat16, or float32 with a bias; rows at or beyond counts[e] are anything.
    """
    E, C, H = hidden.shape
    empty = partial(torch.empty, device=hidden.device)
    if hidden.numel() == 0:
        return empty(E, C, H, dtype=torch.bfloat16)
    with on(hidden.device):
        routing, places = place_batches(counts, C, empty=empty)
        run = gemms(E * C, routing, places, empty=empty)
        y = run(hidden.view(E * C, H), topk=None).view(E, C, H)
    return y if bias is None else y + bias[:, None]
