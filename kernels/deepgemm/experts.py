"""The experts of a layer in FP8 blocks through DeepGEMM's grouped GEMMs, on SM90.

    prepare          sort the routing, quantize each token, lay it in the rows of its experts
    gate and up      DeepGEMM
    act_requantize   the activation function, quantized again
    down             DeepGEMM
    weighted reduce  per token, float32, in the order of its slots

Each expert's rows start at a multiple of 128, and DeepGEMM is told where they end; or they come in
batches, with counts. Both of its inputs are as its kernels read them: scales of activations are
column-major, so nothing is transposed, but for those of batches that come from outside.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moequant.kernels.deepgemm.act_requantize import act_requantize, act_requantize_batched
from moequant.kernels.fp8_block.quantize_permute import prepare
from moequant.kernels.routing import MAX_SLOTS, SortedRouting, max_rows
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.kernels.portable.weights import Act

ALIGNMENT = 128
"""Rows of a tile of DeepGEMM's kernels for SM90, at which every expert begins."""


@dataclass(frozen=True, kw_only=True)
class DeepGemmWeights:
    """Weights of E experts, gate over up.

    Attributes:
        w13: float8_e4m3fn [E, 2 * Ip, H], Ip a multiple of 128.
        w13_scale: float32 [E, 2 * Ip / 128, ceil(H / 128)].
        w2: float8_e4m3fn [E, H, I], I at most Ip.
        w2_scale: float32 [E, ceil(H / 128), ceil(I / 128)].
        act: a gated function.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    act: Act

    @property
    def experts(self) -> int:
        """E."""
        return self.w13.shape[0]


def fused_experts(
    weights: DeepGemmWeights,
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Run the experts once. Nothing is read on the host.

    Args:
        weights: the experts here, on a device of SM90.
        hidden: [M, H] bfloat16, float16 or float32.
        topk_ids: [M, T] int32 or int64; an id that is no expert's, such as -1, contributes nothing.
        topk_weights: [M, T] float32, bfloat16 or float16.
        expert_map: [global experts] int32 or int64, index here or -1.

    Returns:
        [M, H] in the dtype of `hidden`. Results of both GEMMs are rounded to bfloat16; sums over a
        token's slots are float32.
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
    """Buffers for calls of exactly `tokens` tokens with `topk` slots each."""

    def __init__(self, weights: DeepGemmWeights, tokens: int, topk: int) -> None:
        self.weights = weights
        slots = tokens * topk
        E, H, I = weights.w2.shape
        device = weights.w13.device
        rows = max_rows(slots, E, ALIGNMENT)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.routing = SortedRouting.allocate(
            slots, E, alignment=ALIGNMENT, tile_rows=ALIGNMENT, device=device
        )
        self.x = empty(rows, H, dtype=torch.float8_e4m3fn)
        self.x_scale = empty(-(-H // 128), rows, dtype=torch.float32)
        self.gate_up = empty(rows, weights.w13.shape[1], dtype=torch.bfloat16)
        self.act = empty(rows, I, dtype=torch.float8_e4m3fn)
        self.act_scale = empty(-(-I // 128), rows, dtype=torch.float32)
        self.y = empty(rows, H, dtype=torch.bfloat16)

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
            topk_ids: [M, T] contiguous int32 or int64.
            topk_weights: [M, T] contiguous float32, bfloat16 or float16.
            out: [M, H] contiguous bfloat16, float16 or float32, written.
            expert_map: [global experts] int32 or int64, index here or -1.
        """
        w = self.weights
        prepare(
            hidden,
            topk_ids,
            self.routing,
            self.x,
            self.x_scale,
            experts=w.experts,
            alignment=ALIGNMENT,
            tile_rows=ALIGNMENT,
            expert_map=expert_map,
        )
        self._gemm(self.x, self.x_scale, w.w13, w.w13_scale, self.gate_up)
        act_requantize(
            self.gate_up, self.act, self.act_scale, w.act, row_of_slot=self.routing.row_of_slot
        )
        self._gemm(self.act, self.act_scale, w.w2, w.w2_scale, self.y)
        weighted_reduce(self.y, self.routing.row_of_slot, topk_weights, out)

    def _gemm(self, x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor) -> None:
        deep_gemm = _library()
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (x, scale.mT),
            (w, w_scale),
            out,
            self.routing.row_end,
            use_psum_layout=True,
            ensure_zero_padding=False,
        )

    def poison(self) -> None:
        """Fill every buffer with NaN or absurd indices; for tests."""
        for buffer in (self.x, self.act):
            buffer.view(torch.uint8).fill_(0x7F)
        for buffer in (self.x_scale, self.act_scale, self.gate_up, self.y):
            buffer.fill_(torch.nan)
        r = self.routing
        for buffer in (r.slot_of_row, r.row_of_slot, r.row_end, r.tiles, r.tile_count, r.counts):
            buffer.fill_(1 << 20)


def batched_experts(
    weights: DeepGemmWeights, qdata: Tensor, scale: Tensor, counts: Tensor
) -> Tensor:
    """Every expert's result for the first counts[e] of its tokens. Nothing is read on the host.

    Args:
        weights: the E experts here, on a device of SM90.
        qdata: float8_e4m3fn [E, C, H].
        scale: float32 [E, C, ceil(H / 128)].
        counts: [E] int32, at most C.

    Returns:
        [E, C, H] bfloat16; rows at or beyond counts[e] can be anything.
    """
    E, C, H = qdata.shape
    # A tile that begins before counts[e] is written whole: it must end before the next expert.
    pad = (0, 0, 0, -C % ALIGNMENT)
    x = torch.nn.functional.pad(qdata.view(torch.uint8), pad).view(torch.float8_e4m3fn)
    x_scale = torch.nn.functional.pad(scale, pad)
    rows = x.shape[1]
    I = weights.w2.shape[2]

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=qdata.device)

    y = empty(E, rows, H, dtype=torch.bfloat16)
    if y.numel():
        gate_up = empty(E, rows, weights.w13.shape[1], dtype=torch.bfloat16)
        act = empty(E, rows, I, dtype=torch.float8_e4m3fn)
        act_scale = empty(E, -(-I // 128), rows, dtype=torch.float32)
        with torch.cuda.device(qdata.device):
            _masked_gemm(x, x_scale, weights.w13, weights.w13_scale, gate_up, counts)
            act_requantize_batched(gate_up, act, act_scale, weights.act, counts=counts)
            _masked_gemm(act, act_scale.mT, weights.w2, weights.w2_scale, y, counts)
    return y[:, :C]


def _masked_gemm(
    x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor, counts: Tensor
) -> None:
    deep_gemm = _library()
    # Named after what else it multiplies in some wheels, sgl-deep-gemm 0.1.5.post1 for one.
    gemm = getattr(deep_gemm, "m_grouped_fp8_gemm_nt_masked", None)
    if gemm is None:
        gemm = deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked
    # The mean rows of an expert, which only chooses a tile: they are on the device.
    gemm((x, scale), (w, w_scale), out, counts, min(x.shape[1], ALIGNMENT))


def _library() -> Any:
    """The package deep_gemm, which compiles with nvcc when it is used."""
    return importlib.import_module("deep_gemm")
