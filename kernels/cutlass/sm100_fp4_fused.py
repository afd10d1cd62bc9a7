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

from typing import TYPE_CHECKING

import torch

from moequant.kernels.block_scaled_quantize import (
    BlockScaledRows,
    ScalePlaces,
    place_scales,
    quantize_sorted,
)
from moequant.kernels.cutlass.act_rows import act_rows
from moequant.kernels.cutlass.sm100_fp4_launch import Fp4GroupedGemm
from moequant.kernels.cutlass.sm100_fp4_variant import TILE_ROWS
from moequant.kernels.launch import stream_of
from moequant.kernels.routing import Grouping, max_rows, sort_routing
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.cutlass.sm100_fp4_variant import Fp4Variant


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
        self.variant, self.tensors, self.act_fn = variant, tensors, act_fn
        E, H, half = tensors["w2_qdata"].shape
        I = 2 * half  # two codes a byte
        pairs = tokens * topk
        rows = max_rows(pairs, E, 1)
        self.grouping = Grouping(experts=E, tile_rows=TILE_ROWS)
        self.routing = arena.sorted_routing(pairs, self.grouping)
        self.places = ScalePlaces.allocate(pairs, E, empty=arena.empty)
        scheme, empty = variant.name, arena.empty
        self.x = BlockScaledRows.allocate(scheme, rows, H, E, empty=empty)
        self.gate_up = empty(rows, tensors["w13_qdata"].shape[1], dtype=torch.bfloat16)
        self.act = empty(rows, I, dtype=torch.float32)
        self.act_codes = BlockScaledRows.allocate(scheme, rows, I, E, empty=empty)
        self.y = empty(rows, H, dtype=torch.bfloat16)

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
        self._quantize(hidden, self.x, "w13", topk=topk_ids.shape[1])
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
        weighted_reduce(
            self.y,
            routing.row_of_pair,
            topk_weights,
            out,
            bias=self.tensors.get("w2_bias"),
            row_end=routing.row_end,
        )

    def _quantize(self, x: Tensor, out: BlockScaledRows, of: str, *, topk: int | None) -> None:
        static = self.tensors.get(f"{of}_input_scale")
        if static is not None:
            static = static.expand(self.grouping.experts).contiguous()
        quantize_sorted(x, out, self.routing, self.places, topk=topk, static=static)

    def _gemm(self, weight: str, x: BlockScaledRows, out: Tensor) -> None:
        w, alpha = self.tensors[f"{weight}_qdata"], self.tensors.get(f"{weight}_global_scale")
        gemm = Fp4GroupedGemm(
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
        gemm(stream_of(out.device))
