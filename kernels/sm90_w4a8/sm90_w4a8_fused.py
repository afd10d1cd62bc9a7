"""W4A8 experts on SM90: five launches from hidden states to output.

    prepare          sort the routing, quantize each token, lay it in the rows of its experts
    gate and up      grouped GEMM, the activation function in its epilogue, bfloat16
    quantize         each row, as its scale is that of the whole row
    down             grouped GEMM, bfloat16
    weighted reduce  per token, float32, one expert after the other

A `W4a8Plan` holds all of that for one number of tokens: buffers in a workspace, TMA descriptors,
kernels. It reads nothing on the host, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from moequant.act_fn import SILU, ActFn
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.calls import part_tokens, run_in_parts
from moequant.kernels.launch import stream_of
from moequant.kernels.routing import (
    ONE_LAUNCH_SLOTS,
    Grouping,
    SortedRouting,
    chunk_of,
    max_rows,
    sort_routing,
)
from moequant.kernels.sm90.arguments import ROUTED_SLOTS
from moequant.kernels.sm90.quantize_permute import (
    BESIDE_SLOTS,
    copy_rows,
    prepare,
    quantize_rows,
    rows_a_program,
    sort_and_quantize,
)
from moequant.kernels.sm90_w4a8.sm90_w4a8_grouped_gemm import W4a8GemmConfig, W4a8GroupedGemm
from moequant.kernels.sm90_w4a8.tiling import W4a8Tiling, tiling_for
from moequant.kernels.weighted_reduce import weighted_reduce

_PLANS_KEPT = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class W4a8Weights:
    """Weights of E experts as `layout.pack` makes them.

    Attributes:
        w13: uint8 [E, panels, H / 128, PANEL_BYTES], gate and up, or up alone.
        w2: uint8 [E, panels, I / 128, PANEL_BYTES].
        hidden: H, a multiple of 128.
        intermediate: I, a multiple of 128.
        bias13: float32 [E, 2 * I], gate over up, or [E, I]; None is 0.
        bias2: float32 [E, H]; None is 0.
        act_fn: the function between the GEMMs.
    """

    w13: Tensor
    w2: Tensor
    hidden: int
    intermediate: int
    bias13: Tensor | None = None
    bias2: Tensor | None = None
    act_fn: ActFn = SILU
    _plans: dict[tuple[int, ...], W4a8Plan] = field(default_factory=dict, init=False, repr=False)
    _workspace_bytes: dict[tuple[int, int], int] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def experts(self) -> int:
        """E."""
        return self.w13.shape[0]

    def tiling(self, tokens: int, topk: int) -> W4a8Tiling:
        """That of calls of [tokens, topk] token-expert pairs, at most MAX_SLOTS."""
        properties = torch.cuda.get_device_properties(self.w13.device)
        return tiling_for(
            pairs=tokens * topk,
            experts=self.experts,
            hidden=self.hidden,
            intermediate=self.intermediate,
            sms=properties.multi_processor_count,
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plans": {}}  # they hold addresses


def fused_experts(
    weights: W4a8Weights,
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

    The result of the activation function is rounded to bfloat16 before it is quantized, and so is
    each expert's result; their sum is float32. More than MAX_SLOTS token-expert pairs run in parts.
    What a call of a size needs beside the workspace is made in the first one, and kept for as long
    as calls have the same workspace.

    Args:
        weights: the experts here, on a device of SM90.
        hidden: [M, H] bfloat16, float16 or float32.
        topk_weights: [M, T] float32, bfloat16 or float16.
        topk_ids: [M, T] int32 or int64; an id that is no expert's, such as -1, contributes nothing.
        out: [M, H] contiguous bfloat16, float16 or float32, written.
        workspace: uint8, at least `workspace_bytes`, with any contents.
        expert_map: [global experts] int32 or int64, index here or -1.
        hidden_scale: where `hidden` is quantized, float8_e4m3fn, its scales: float32 [M, 1].
    """
    T = topk_ids.shape[1]

    def plan_for(tokens: int) -> W4a8Plan:
        return _plan(weights, tokens, T, workspace)

    run_in_parts(
        plan_for,
        hidden,
        topk_weights,
        topk_ids,
        out=out,
        expert_map=expert_map,
        hidden_scale=hidden_scale,
    )


def workspace_bytes(
    weights: W4a8Weights, tokens: int, topk: int, tiling: W4a8Tiling | None = None
) -> int:
    """Scratch memory of a call of [tokens, topk] pairs, with a tiling other than its own or not."""
    if tokens * topk == 0:
        return 0
    if tiling is None:
        known = weights._workspace_bytes
        if (tokens, topk) not in known:
            own = weights.tiling(part_tokens(tokens, topk), topk)
            known[tokens, topk] = workspace_bytes(weights, tokens, topk, own)
        return known[tokens, topk]
    arena = WorkspaceArena()
    W4a8Buffers.carve(weights, part_tokens(tokens, topk), topk, tiling, arena)
    return arena.size_bytes


def kernels_for(weights: W4a8Weights, tokens: int, topk: int) -> tuple[object, ...]:
    """Equal for calls that run the same kernels.

    The sort is compiled for the next power of two of the pairs, and Triton compiles apart for
    numbers that are 1 or multiples of 16: here tokens and pairs.
    """
    tokens = part_tokens(tokens, topk)
    pairs = tokens * topk
    tiling = weights.tiling(tokens, topk)
    return (
        tiling,
        topk,
        _routed(tiling, pairs),
        (pairs - 1).bit_length() if pairs <= ONE_LAUNCH_SLOTS else chunk_of(pairs),
        pairs <= BESIDE_SLOTS,
        rows_a_program(pairs, weights.intermediate),
        rows_a_program(tokens, weights.hidden),
        tokens == 1,
        tokens <= 64,
        tokens % 16 == 0,
        pairs % 16 == 0,
    )


def _plan(weights: W4a8Weights, tokens: int, topk: int, workspace: Tensor) -> W4a8Plan:
    """A plan in `workspace`: one that was made before, where that has not moved."""
    key = (tokens, topk, workspace.data_ptr())
    plans = weights._plans
    plan = plans.get(key)
    if plan is None:
        plan = W4a8Plan(weights, tokens, topk, workspace=workspace)
        if not torch.cuda.is_current_stream_capturing():  # that workspace is the graph's own
            # A copy, and pop: another thread may be at the same.
            for old, other in list(plans.items()):
                if other.workspace() is None or len(plans) >= _PLANS_KEPT:
                    plans.pop(old, None)
            plans[key] = plan
    return plan


@dataclass(frozen=True, kw_only=True)
class W4a8Buffers:
    """What the kernels of a call hand on, in a workspace.

    Attributes:
        routing: the sorted routing.
        x: float8_e4m3fn [rows, H], the tokens in the order of the experts; or [M, H], as they
            come, where the first GEMM gathers.
        x_scale: float32 [rows] or [M].
        act: bfloat16 [rows, I], what the first GEMM leaves.
        act_codes: float8_e4m3fn [rows, I], the same quantized.
        act_scale: float32 [rows].
        y: bfloat16 [rows, H], the experts' results.
    """

    routing: SortedRouting
    x: Tensor
    x_scale: Tensor
    act: Tensor
    act_codes: Tensor
    act_scale: Tensor
    y: Tensor

    @staticmethod
    def carve(
        weights: W4a8Weights, tokens: int, topk: int, tiling: W4a8Tiling, arena: WorkspaceArena
    ) -> W4a8Buffers:
        """Those of a call of [tokens, topk] pairs, at most MAX_SLOTS."""
        pairs = tokens * topk
        H, I = weights.hidden, weights.intermediate
        rows = max_rows(pairs, weights.experts, 1)
        return W4a8Buffers(
            routing=arena.sorted_routing(pairs, _grouping(weights, tiling)),
            x=arena.empty(tokens if tiling.gather else rows, H, dtype=torch.float8_e4m3fn),
            x_scale=arena.empty(tokens if tiling.gather else rows, dtype=torch.float32),
            act=arena.empty(rows, I, dtype=torch.bfloat16),
            act_codes=arena.empty(rows, I, dtype=torch.float8_e4m3fn),
            act_scale=arena.empty(rows, dtype=torch.float32),
            y=arena.empty(rows, H, dtype=torch.bfloat16),
        )


class W4a8Plan:
    """Kernels and buffers for calls of exactly `tokens` tokens with `topk` experts each.

    Args:
        weights: the experts.
        tokens: M, at least 1; M * T at most MAX_SLOTS.
        topk: T, at least 1.
        workspace: uint8, at least `workspace_bytes`.
        tiling: by default the weights' own; `workspace` is then as large as that wants.
    """

    def __init__(
        self,
        weights: W4a8Weights,
        tokens: int,
        topk: int,
        *,
        workspace: Tensor,
        tiling: W4a8Tiling | None = None,
    ) -> None:
        self.tiling = weights.tiling(tokens, topk) if tiling is None else tiling
        self.buffers = W4a8Buffers.carve(
            weights, tokens, topk, self.tiling, WorkspaceArena(workspace)
        )
        self.workspace = ref(workspace)
        self.grouping = _grouping(weights, self.tiling)
        self._routed = _routed(self.tiling, tokens * topk)
        b = self.buffers
        self.gate_up = W4a8GroupedGemm(
            gate_up_config(weights, self.tiling, topk, routed=self._routed),
            weight=weights.w13,
            x=b.x,
            x_scale=b.x_scale,
            slot_of_row=b.routing.slot_of_row if self.tiling.gather else None,
            tiles=b.routing.tiles,
            tile_count=b.routing.tile_count,
            units_taken=b.routing.units_taken[:1],
            out=b.act,
            bias=weights.bias13,
            act_fn=weights.act_fn,
        )
        self.down = W4a8GroupedGemm(
            down_config(weights, self.tiling),
            weight=weights.w2,
            x=b.act_codes,
            x_scale=b.act_scale,
            tiles=b.routing.tiles,
            tile_count=b.routing.tile_count,
            units_taken=b.routing.units_taken[1:],
            out=b.y,
            bias=weights.bias2,
        )

    def prepare(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> None:
        """First launches: sort, quantize and permute."""
        if self._routed:
            self.gate_up.route(topk_ids, expert_map)
        b = self.buffers
        if hidden_scale is not None:
            sort_routing(topk_ids, b.routing, self.grouping, expert_map=expert_map)
            if self.tiling.gather:
                b.x.copy_(hidden)
                b.x_scale.copy_(hidden_scale[:, 0])
            else:
                copy_rows(hidden, hidden_scale, b.routing.row_of_slot, b.x, b.x_scale)
            return
        (sort_and_quantize if self.tiling.gather else prepare)(
            hidden, topk_ids, b.routing, b.x, b.x_scale, self.grouping, expert_map=expert_map
        )

    def quantize(self) -> None:
        """What the first GEMM leaves."""
        b = self.buffers
        quantize_rows(b.act, b.routing, b.act_codes, b.act_scale)

    def __call__(
        self,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> None:
        """Run the experts on the current stream.

        Args:
            hidden: [M, H] contiguous bfloat16, float16 or float32; float8_e4m3fn with a
                `hidden_scale`.
            topk_weights: [M, T] contiguous float32, bfloat16 or float16.
            topk_ids: [M, T] contiguous int32 or int64; any id that is no expert's is for none.
            out: [M, H] contiguous bfloat16, float16 or float32, written.
            expert_map: [global experts] contiguous int32 or int64, index here or -1.
            hidden_scale: see `fused_experts`; contiguous.
        """
        stream = stream_of(hidden.device)
        self.prepare(hidden, topk_ids, expert_map, hidden_scale)
        self.gate_up(stream)
        self.quantize()
        self.down(stream)
        weighted_reduce(self.buffers.y, self.buffers.routing.row_of_slot, topk_weights, out)


def gate_up_config(
    weights: W4a8Weights, tiling: W4a8Tiling, topk: int, *, routed: bool
) -> W4a8GemmConfig:
    """The first GEMM; `routed` if it finds its tiles by itself."""
    return W4a8GemmConfig(
        act=weights.act_fn.name,
        gated=weights.act_fn.gated,
        limited=weights.act_fn.limit is not None,
        bias=weights.bias13 is not None,
        gather=topk if tiling.gather else 0,
        routed=routed,
        rows=tiling.rows,
        split=tiling.split13,
        pair=tiling.pair,
        K=weights.hidden,
        n_out=weights.intermediate,
    )


def down_config(weights: W4a8Weights, tiling: W4a8Tiling) -> W4a8GemmConfig:
    """The second GEMM."""
    return W4a8GemmConfig(
        act=None,
        gated=False,
        bias=weights.bias2 is not None,
        rows=tiling.rows,
        split=tiling.split2,
        pair=tiling.pair,
        K=weights.intermediate,
        n_out=weights.hidden,
    )


def _grouping(weights: W4a8Weights, tiling: W4a8Tiling) -> Grouping:
    return Grouping(experts=weights.experts, tile_rows=tiling.rows)


def _routed(tiling: W4a8Tiling, pairs: int) -> bool:
    return tiling.rows == 8 and pairs <= ROUTED_SLOTS
