"""Experts in FP4 with activations in FP4, through the grouped GEMM in CuTe DSL, on SM100.

    sort             the pairs by expert; where the scales of their rows lie
    quantize         each pair's token, into the row of its expert
    gate and up      grouped GEMM
    act_rows         biases, the activation function
    quantize
    down             grouped GEMM
    weighted reduce  per token, float32, in the order of its experts

Results of both GEMMs are rounded to bfloat16. Nothing is read on the host.

Compiled, never run: there was no SM100 GPU.
"""

from __future__ import annotations

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
from moequant.kernels.cutlass.sm100_fp4_launch import Fp4GroupedGemm
from moequant.kernels.cutlass.sm100_fp4_variant import TILE_ROWS
from moequant.kernels.launch import stream_of
from moequant.kernels.routing import Grouping, max_rows, sort_routing
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.cutlass.sm100_fp4_variant import Fp4Variant
    from moequant.kernels.routing import SortedRouting


class Fp4Plan:
    """Buffers for calls of exactly `tokens` tokens with `topk` experts each, in `arena`.

    Args:
        variant: the format of weights and activations.
        tensors: that format in the layout `stacked`, but scales swizzled 128x4; on a device of
            SM100. With `w13_input_scale` and `w2_input_scale`, the global scales of activations are
            these, else of each row.
        act_fn: the function between the GEMMs.
        tokens: M, at least 1; M * T at most MAX_PAIRS.
        topk: T, at least 1.
        arena: where buffers come from.
    """

    def __init__(
        self,
        variant: Fp4Variant,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        tokens: int,
        topk: int,
        arena: WorkspaceArena,
    ) -> None:
        E, pairs = tensors["w2_qdata"].shape[0], tokens * topk
        self.grouping = Grouping(experts=E, tile_rows=TILE_ROWS)
        self.routing = arena.sorted_routing(pairs, self.grouping)
        self.places = ScalePlaces.allocate(pairs, E, empty=arena.empty)
        self.bias = tensors.get("w2_bias")
        rows = max_rows(pairs, E, 1)
        self.gemms = Fp4Gemms(
            variant, tensors, act_fn, rows, self.routing, self.places, empty=arena.empty
        )

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
        routing, places = self.routing, self.places
        sort_routing(topk_ids, routing, self.grouping, expert_map=expert_map)
        place_scales(topk_ids, routing, places, self.grouping, expert_map=expert_map)
        weighted_reduce(
            self.gemms(hidden, topk=topk_ids.shape[1]),
            routing.row_of_pair,
            topk_weights,
            out,
            bias=self.bias,
            row_end=routing.row_end,
        )


def batched_experts(
    variant: Fp4Variant,
    tensors: Mapping[str, Tensor],
    act_fn: ActFn,
    hidden: Tensor,
    counts: Tensor,
) -> Tensor:
    """Every expert's result for the first counts[e] of its tokens. Nothing is read on the host.

    Args:
        variant: as for `Fp4Plan`.
        tensors: as for `Fp4Plan`.
        act_fn: the function between the GEMMs.
        hidden: [E, C, H] contiguous bfloat16, float16 or float32.
        counts: [E] int32, at least 0; more than C is C.

    Returns:
        [E, C, H] bfloat16, or float32 where down has biases; rows at or beyond counts[e] are
        anything.
    """
    E, C, H = hidden.shape
    empty = partial(torch.empty, device=hidden.device)
    if hidden.numel() == 0:
        return empty(E, C, H, dtype=torch.bfloat16)
    with on(hidden.device):
        routing, places = place_batches(counts, C, empty=empty)
        gemms = Fp4Gemms(variant, tensors, act_fn, E * C, routing, places, empty=empty)
        y = gemms(hidden.view(E * C, H), topk=None).view(E, C, H)
    bias = tensors.get("w2_bias")
    return y if bias is None else y + bias[:, None]


class Fp4Gemms:
    """Both GEMMs of rows in the order of their experts, with what goes in and lies between.

    Args:
        variant: as for `Fp4Plan`.
        tensors: as for `Fp4Plan`.
        act_fn: the function between the GEMMs.
        rows: R, of all buffers.
        routing: where rows lie, in tiles of TILE_ROWS; written before a call.
        places: where the scales of these rows lie; likewise.
        empty: makes a tensor of a shape and `dtype`.
    """

    def __init__(
        self,
        variant: Fp4Variant,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        rows: int,
        routing: SortedRouting,
        places: ScalePlaces,
        *,
        empty: Callable[..., Tensor],
    ) -> None:
        self.variant, self.tensors, self.act_fn = variant, tensors, act_fn
        self.routing, self.places = routing, places
        E, H, half = tensors["w2_qdata"].shape
        I = 2 * half  # two codes a byte
        self.x = BlockScaledRows.allocate(variant.name, rows, H, E, empty=empty)
        self.gate_up = empty(rows, tensors["w13_qdata"].shape[1], dtype=torch.bfloat16)
        self.act = empty(rows, I, dtype=torch.float32)
        self.act_codes = BlockScaledRows.allocate(variant.name, rows, I, E, empty=empty)
        self.y = empty(rows, H, dtype=torch.bfloat16)
        self._launches: dict[str, Fp4GroupedGemm] = {}

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
        self._gemm("w13", self.x, self.gate_up)
        act_rows(
            self.gate_up,
            self.act,
            self.act_fn,
            routing.row_of_pair,
            routing.row_end,
            bias=self.tensors.get("w13_bias"),
        )
        self._quantize(self.act, self.act_codes, "w2", topk=None)
        self._gemm("w2", self.act_codes, self.y)
        return self.y

    def _quantize(self, x: Tensor, out: BlockScaledRows, of: str, *, topk: int | None) -> None:
        static = self.tensors.get(f"{of}_input_scale")
        if static is not None:
            static = static.expand(self.routing.row_end.shape[0]).contiguous()
        quantize_sorted(x, out, self.routing, self.places, topk=topk, static=static)

    def _gemm(self, weight: str, x: BlockScaledRows, out: Tensor) -> None:
        # Made by the first call, and kept: encoding four TMA descriptors takes the host longer than
        # a launch. Not before, because buffers that only count bytes have no address to encode.
        gemm = self._launches.get(weight)
        if gemm is None:
            gemm = self._launches[weight] = self._launch_of(weight, x, out)
        gemm(stream_of(out.device))

    def _launch_of(self, weight: str, x: BlockScaledRows, out: Tensor) -> Fp4GroupedGemm:
        w, alpha = self.tensors[f"{weight}_qdata"], self.tensors.get(f"{weight}_global_scale")
        return Fp4GroupedGemm(
            self.variant,
            x=x.codes,
            x_scale=x.scale,
            x_factor=x.global_scale,
            w=w,
            w_scale=self.tensors[f"{weight}_scale"],
            alpha=None if alpha is None else alpha.view(w.shape[0], -1),
            tiles=self.routing.tiles,
            tile_count=self.routing.tile_count,
            out=out,
        )
