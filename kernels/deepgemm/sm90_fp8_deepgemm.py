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
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import UnsupportedError
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.calls import on, part_tokens, run_in_parts
from moequant.kernels.deepgemm.act_requantize import act_requantize, act_requantize_batched
from moequant.kernels.routing import Grouping, max_rows, sort_routing
from moequant.kernels.sm90.quantize_permute import copy_rows, prepare
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from moequant.act_fn import ActFn

ALIGNMENT = 128
"""Rows of a tile of DeepGEMM's kernels for SM90, at which every expert begins."""

_ALIGNMENT_LOCK = Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepGemmWeights:
    """Weights of E experts, gate over up.

    Attributes:
        w13: float8_e4m3fn [E, 2 * Ip, H], Ip a multiple of 128; [E, Ip, H] where there is no gate.
        w13_scale: float32 [E, 2 * Ip / 128, ceil(H / 128)], or half as many rows.
        w2: float8_e4m3fn [E, H, I], I at most Ip.
        w2_scale: float32 [E, ceil(H / 128), ceil(I / 128)].
        act_fn: the function between them.
        bias13: float32 [E, 2 * Ip] or [E, Ip] contiguous; None is 0.
        bias2: float32 [E, H] contiguous; None is 0.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    act_fn: ActFn
    bias13: Tensor | None = None
    bias2: Tensor | None = None

    @property
    def experts(self) -> int:
        """E."""
        return self.w13.shape[0]


def fused_experts(
    weights: DeepGemmWeights,
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    out: Tensor,
    workspace: Tensor,
    expert_map: Tensor | None = None,
    hidden_scale: Tensor | None = None,
) -> None:
    """Run the experts once. Nothing is read on the host.

    Results of both GEMMs are rounded to bfloat16; sums over a token's experts are float32.

    Args:
        weights: the experts here, on a device of SM90.
        hidden: [M, H] bfloat16, float16 or float32.
        topk_weights: [M, T] float32, bfloat16 or float16.
        topk_ids: [M, T] int32 or int64; an id that is no expert's, such as -1, contributes nothing.
        out: [M, H] contiguous bfloat16, float16 or float32, written.
        workspace: uint8, at least `workspace_bytes`, with any contents.
        expert_map: [global experts] int32 or int64, index here or -1.
        hidden_scale: where `hidden` is quantized, float8_e4m3fn, its scales: float32
            [M, ceil(H / 128)].
    """
    T = topk_ids.shape[1]

    def plan_for(tokens: int) -> DeepGemmPlan:
        return DeepGemmPlan(weights, tokens, T, WorkspaceArena(workspace))

    run_in_parts(
        plan_for,
        hidden,
        topk_weights,
        topk_ids,
        out=out,
        expert_map=expert_map,
        hidden_scale=hidden_scale,
    )


def workspace_bytes(weights: DeepGemmWeights, tokens: int, topk: int) -> int:
    """Scratch memory of a call of [tokens, topk] slots."""
    arena = WorkspaceArena()
    DeepGemmPlan(weights, part_tokens(tokens, topk), topk, arena)
    return arena.size_bytes


def rows_of(weights: DeepGemmWeights, tokens: int, topk: int) -> int:
    """Rows that DeepGEMM is given for [tokens, topk] slots, by which it chooses its kernels."""
    return max_rows(part_tokens(tokens, topk) * topk, weights.experts, ALIGNMENT)


class DeepGemmPlan:
    """Buffers for calls of exactly `tokens` tokens with `topk` slots each, in `arena`."""

    def __init__(
        self, weights: DeepGemmWeights, tokens: int, topk: int, arena: WorkspaceArena
    ) -> None:
        self.weights = weights
        slots = tokens * topk
        E, H, I = weights.w2.shape
        rows = max_rows(slots, E, ALIGNMENT)
        self.grouping = Grouping(experts=E, tile_rows=ALIGNMENT, alignment=ALIGNMENT)
        self.routing = arena.sorted_routing(slots, self.grouping)
        self.x = arena.empty(rows, H, dtype=torch.float8_e4m3fn)
        self.x_scale = arena.empty(-(-H // 128), rows, dtype=torch.float32)
        self.gate_up = arena.empty(rows, weights.w13.shape[1], dtype=torch.bfloat16)
        self.act = arena.empty(rows, I, dtype=torch.float8_e4m3fn)
        self.act_scale = arena.empty(-(-I // 128), rows, dtype=torch.float32)
        self.y = arena.empty(rows, H, dtype=torch.bfloat16)

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
            hidden: [M, H] contiguous bfloat16, float16 or float32; float8_e4m3fn with a
                `hidden_scale`.
            topk_weights: [M, T] contiguous float32, bfloat16 or float16.
            topk_ids: [M, T] contiguous int32 or int64.
            out: [M, H] contiguous bfloat16, float16 or float32, written.
            expert_map: [global experts] int32 or int64, index here or -1.
            hidden_scale: see `fused_experts`; contiguous.
        """
        w = self.weights
        if hidden_scale is None:
            prepare(
                hidden,
                topk_ids,
                self.routing,
                self.x,
                self.x_scale,
                self.grouping,
                expert_map=expert_map,
            )
        else:
            sort_routing(topk_ids, self.routing, self.grouping, expert_map=expert_map)
            copy_rows(hidden, hidden_scale, self.routing.row_of_slot, self.x, self.x_scale)
        self._gemm(self.x, self.x_scale, w.w13, w.w13_scale, self.gate_up)
        routing = self.routing
        act_requantize(
            self.gate_up,
            self.act,
            self.act_scale,
            w.act_fn,
            row_of_slot=routing.row_of_slot,
            bias=w.bias13,
            row_end=routing.row_end,
        )
        self._gemm(self.act, self.act_scale, w.w2, w.w2_scale, self.y)
        weighted_reduce(
            self.y,
            routing.row_of_slot,
            topk_weights,
            out,
            bias=w.bias2,
            row_end=routing.row_end,
        )

    def _gemm(self, x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, out: Tensor) -> None:
        deep_gemm = _library()
        with _aligned(deep_gemm):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (x, scale.mT),
                (w, w_scale),
                out,
                self.routing.row_end,
                use_psum_layout=True,
                ensure_zero_padding=False,
            )


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
        [E, C, H] bfloat16, rounded twice with a bias; rows at or beyond counts[e] can be anything.
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
        with on(qdata.device):
            _masked_gemm(x, x_scale, weights.w13, weights.w13_scale, gate_up, counts)
            act_requantize_batched(
                gate_up, act, act_scale, weights.act_fn, counts=counts, bias=weights.bias13
            )
            _masked_gemm(act, act_scale.mT, weights.w2, weights.w2_scale, y, counts)
        if weights.bias2 is not None:
            y += weights.bias2[:, None]
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


@contextmanager
def _aligned(deep_gemm: Any) -> Iterator[None]:
    """Within it, DeepGEMM expects each expert's rows at a multiple of ALIGNMENT.

    That is a setting of the process, and another library may have changed it. Its value is put
    back afterwards: it matters only while a call is launched.

    Raises:
        UnsupportedError: it has another value, and this release of deep_gemm cannot set it.
    """
    with _ALIGNMENT_LOCK:
        found = deep_gemm.get_mk_alignment_for_contiguous_layout()
        if found == ALIGNMENT:
            yield
            return
        set_alignment = _alignment_setter(deep_gemm, found)
        set_alignment(ALIGNMENT)
        try:
            yield
        finally:
            set_alignment(found)


def _alignment_setter(deep_gemm: Any, found: int) -> Callable[[int], None]:
    name = "set_mk_alignment_for_contiguous_layout"
    # sgl-deep-gemm 0.1.5.post1 has it in its extension module alone.
    for module in (deep_gemm, getattr(deep_gemm, "_C", None)):
        setter: Callable[[int], None] | None = getattr(module, name, None)
        if setter is not None:
            return setter
    raise UnsupportedError(
        f"the alignment of deep_gemm's contiguous layout is {found}, but these experts want "
        f"{ALIGNMENT}, and this release of deep_gemm has no {name}; set it back to {ALIGNMENT} "
        "where it was changed, or use the backend sm90_fp8_block"
    )


def _library() -> Any:
    """The package deep_gemm, which compiles with nvcc when it is used."""
    return importlib.import_module("deep_gemm")
