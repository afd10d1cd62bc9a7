"""The experts of a layer in FP8 blocks on SM90: four launches from hidden states to output.

    prepare          sort the routing, quantize each token, lay it in the rows of its experts
    gate and up      grouped GEMM, silu(gate) * up and quantization in its epilogue
    down             grouped GEMM, bfloat16
    weighted reduce  per token, float32, in the order of its slots

A `Plan` is all of that for one number of tokens: buffers, TMA descriptors, kernels. It reads
nothing on the host, so a call can be captured in a CUDA graph. `fused_experts` makes one a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moequant.kernels.fp8_block.grouped_gemm import GemmConfig, GroupedGemm
from moequant.kernels.fp8_block.quantize_permute import prepare
from moequant.kernels.routing import MAX_SLOTS, SortedRouting, max_rows
from moequant.kernels.weighted_reduce import weighted_reduce

_SMS = 132  # of an H200


@dataclass(frozen=True, kw_only=True)
class Fp8BlockWeights:
    """Weights of E experts as they are on disk, gate over up.

    Attributes:
        w13: float8_e4m3fn [E, 2 * Ip, H], Ip a multiple of 128.
        w13_scale: float32 [E, 2 * Ip / 128, ceil(H / 128)].
        w2: float8_e4m3fn [E, H, I], I at most Ip.
        w2_scale: float32 [E, ceil(H / 128), ceil(I / 128)].
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    @property
    def experts(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.w13.shape[2]

    @property
    def intermediate(self) -> int:
        """Ip."""
        return self.w13.shape[1] // 2


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tunable part of a plan.

    Attributes:
        rows: most rows of a tile, 8 to 128; the smaller the fewer wasted, the larger the fewer
            times weights are read.
        split13: CTAs along K of the first GEMM.
        split2: of the second.
    """

    rows: int
    split13: int = 1
    split2: int = 1


def default_tiling(weights: Fp8BlockWeights, slots: int) -> Tiling:
    """Rows that nearly all experts fit in under uniform routing; split while SMs are idle."""
    mean = slots / weights.experts
    likely = mean + 2 * mean**0.5
    rows = next((rows for rows in (8, 16, 32, 64) if likely <= rows), 128)
    active = min(slots, weights.experts)

    units13 = active * (weights.intermediate // 128)
    units2 = active * -(-weights.hidden // 256)
    # Between one and two rounds of the SMs, halves fill the second: Mixtral at one token, 224
    # units, takes 97 us instead of 108.
    uneven = _SMS < units13 < 2 * _SMS
    few = rows <= 16
    return Tiling(
        rows=rows,
        split13=2 if few and (uneven or units13 * 4 <= _SMS) else 1,
        split2=2 if few and units2 * 4 <= _SMS else 1,
    )


def fused_experts(
    weights: Fp8BlockWeights,
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Run the experts once. Nothing is read on the host, and nothing kept but compiled kernels.

    Buffers come from torch's allocator and go back to it, so calls of one stream share them, and
    those of a captured call belong to the graph. More than MAX_SLOTS slots run in parts.

    Args:
        weights: the experts here, on a device of SM90; H and I multiples of 16.
        hidden: [M, H] bfloat16, float16 or float32.
        topk_ids: [M, T] int32 or int64; an id that is no expert's, such as -1, contributes nothing.
        topk_weights: [M, T] float32, bfloat16 or float16.
        expert_map: [global experts] int32 or int64, index here or -1.

    Returns:
        [M, H] in the dtype of `hidden`. Each expert's result is rounded to bfloat16; their sum is
        float32.
    """
    T = topk_ids.shape[1]
    if topk_ids.numel() == 0:
        return torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    hidden, topk_ids, topk_weights = (t.contiguous() for t in (hidden, topk_ids, topk_weights))
    if expert_map is not None:
        expert_map = expert_map.contiguous()
    out = torch.empty_like(hidden)
    most = max(MAX_SLOTS // T, 1)
    with torch.cuda.device(hidden.device):
        for first in range(0, hidden.shape[0], most):
            part = slice(first, first + most)
            plan = Plan(weights, out[part].shape[0], T)
            plan(hidden[part], topk_ids[part], topk_weights[part], out[part], expert_map)
    return out


class Plan:
    """Buffers and kernels for calls of exactly `tokens` tokens with `topk` slots each."""

    def __init__(
        self, weights: Fp8BlockWeights, tokens: int, topk: int, *, tiling: Tiling | None = None
    ) -> None:
        self.weights = weights
        self.slots = tokens * topk
        self.tiling = default_tiling(weights, self.slots) if tiling is None else tiling
        E, H, I = weights.experts, weights.hidden, weights.intermediate
        device = weights.w13.device
        rows = max_rows(self.slots, E, 1)
        stride = -(-rows // 4) * 4

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.routing = SortedRouting.allocate(
            self.slots, E, alignment=1, tile_rows=self.tiling.rows, device=device
        )
        self.x = empty(rows, H, dtype=torch.float8_e4m3fn)
        self.x_scale = empty(-(-H // 128), stride, dtype=torch.float32)
        self.act = empty(rows, I, dtype=torch.float8_e4m3fn)
        self.act_scale = empty(I // 128, stride, dtype=torch.float32)
        self.y = empty(rows, H, dtype=torch.bfloat16)
        self.gate_up = GroupedGemm(
            GemmConfig(
                gated=True,
                rows=self.tiling.rows,
                split=self.tiling.split13,
                K=H,
                n_out=I,
                w_rows=2 * I,
            ),
            weight=weights.w13,
            weight_scale=weights.w13_scale,
            x=self.x,
            x_scale=self.x_scale,
            tiles=self.routing.tiles,
            tile_count=self.routing.tile_count,
            units_taken=self.routing.units_taken[:1],
            out=self.act,
            out_scale=self.act_scale,
        )
        self.down = GroupedGemm(
            GemmConfig(
                gated=False,
                rows=self.tiling.rows,
                split=self.tiling.split2,
                K=weights.w2.shape[2],
                n_out=H,
                w_rows=H,
            ),
            weight=weights.w2,
            weight_scale=weights.w2_scale,
            x=self.act,
            x_scale=self.act_scale,
            tiles=self.routing.tiles,
            tile_count=self.routing.tile_count,
            units_taken=self.routing.units_taken[1:],
            out=self.y,
            out_scale=None,
        )

    def prepare(self, hidden: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None) -> None:
        """First launch: see `quantize_permute.prepare`."""
        prepare(
            hidden,
            topk_ids,
            self.routing,
            self.x,
            self.x_scale,
            experts=self.weights.experts,
            alignment=1,
            tile_rows=self.tiling.rows,
            expert_map=expert_map,
        )

    def __call__(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
        expert_map: Tensor | None = None,
    ) -> None:
        """Run the experts.

        Args:
            hidden: [M, H] contiguous bfloat16, float16 or float32.
            topk_ids: [M, T] contiguous int32 or int64; any id that is no expert's is for none.
            topk_weights: [M, T] contiguous float32, bfloat16 or float16.
            out: [M, H] contiguous bfloat16, float16 or float32, written.
            expert_map: [global experts] int32 or int64, index here or -1.
        """
        if self.slots == 0:
            return
        self.prepare(hidden, topk_ids, expert_map)
        self.gate_up()
        self.down()
        weighted_reduce(self.y, self.routing.row_of_slot, topk_weights, out)

    def poison(self) -> None:
        """Fill every buffer with NaN or absurd indices; for tests."""
        for buffer in (self.x, self.act):
            buffer.view(torch.uint8).fill_(0x7F)
        for buffer in (self.x_scale, self.act_scale, self.y):
            buffer.fill_(float("nan"))
        r = self.routing
        for buffer in (r.slot_of_row, r.row_of_slot, r.row_end, r.tiles, r.tile_count, r.counts):
            buffer.fill_(1 << 20)
