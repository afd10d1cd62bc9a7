"""The experts of a layer in FP8 blocks on SM90: four launches from hidden states to output.

    prepare          sort the routing, quantize each token, lay it in the rows of its experts
    gate and up      grouped GEMM, the activation function and quantization in its epilogue
    down             grouped GEMM, bfloat16
    weighted reduce  per token, float32, in the order of its slots

An `Fp8BlockPlan` holds all of that for one number of tokens: buffers in a workspace, TMA
descriptors, kernels. It reads nothing on the host, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from moequant.act_fn import SILU, ActFn
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.calls import part_tokens, run_in_parts
from moequant.kernels.fp8_block.sm90_fp8_grouped_gemm import GemmConfig, GroupedGemm
from moequant.kernels.fp8_block.tuning import Tiling, TuningProblem, tiling_for
from moequant.kernels.launch import Relaunch, stream_of
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
    sort_and_quantize,
)
from moequant.kernels.weighted_reduce import weighted_reduce

_PLANS_KEPT = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8BlockWeights:
    """Weights of E experts as they are on disk, gate over up.

    Attributes:
        w13: float8_e4m3fn [E, 2 * Ip, H], Ip a multiple of 128; [E, Ip, H] where there is no gate.
        w13_scale: float32 [E, 2 * Ip / 128, ceil(H / 128)], or half as many rows.
        w2: float8_e4m3fn [E, H, I], I at most Ip.
        w2_scale: float32 [E, ceil(H / 128), ceil(I / 128)].
        bias13: float32 [E, 2 * Ip] or [E, Ip], 0 where padded; None is 0.
        bias2: float32 [E, H]; None is 0.
        act_fn: the function between the GEMMs.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    bias13: Tensor | None = None
    bias2: Tensor | None = None
    act_fn: ActFn = SILU
    _plans: dict[tuple[int, ...], Fp8BlockPlan] = field(
        default_factory=dict, init=False, repr=False
    )
    _tilings: dict[tuple[int, int], Tiling] = field(default_factory=dict, init=False, repr=False)
    _workspace_bytes: dict[tuple[int, int], int] = field(
        default_factory=dict, init=False, repr=False
    )

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
        return self.w13.shape[1] // (2 if self.act_fn.gated else 1)

    def tiling(self, tokens: int, topk: int) -> Tiling:
        """That of calls of [tokens, topk] slots, at most MAX_SLOTS; the same every time."""
        known = self._tilings
        if (tokens, topk) not in known:
            known[tokens, topk] = tiling_for(self.problem(tokens, topk))
        return known[tokens, topk]

    def problem(self, tokens: int, topk: int) -> TuningProblem:
        """What a tiling is chosen for."""
        properties = torch.cuda.get_device_properties(self.w13.device)
        return TuningProblem(
            gpu=properties.name,
            sms=properties.multi_processor_count,
            experts=self.experts,
            hidden=self.hidden,
            intermediate=self.w2.shape[2],
            topk=topk,
            tokens=tokens,
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plans": {}}  # plans hold addresses


def fused_experts(
    weights: Fp8BlockWeights,
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

    Each expert's result is rounded to bfloat16; their sum is float32. More than MAX_SLOTS
    token-expert pairs run in parts. What a call of a size needs beside the workspace is made in the
    first one, and kept for as long as calls have the same workspace.

    Args:
        weights: the experts here, on a device of SM90; H and I multiples of 16.
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

    def plan_for(tokens: int) -> Fp8BlockPlan:
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
    weights: Fp8BlockWeights, tokens: int, topk: int, tiling: Tiling | None = None
) -> int:
    """Scratch memory of a call of [tokens, topk] slots, with a tiling other than its own or not."""
    if tiling is None:
        known = weights._workspace_bytes
        if (tokens, topk) not in known:
            own = weights.tiling(part_tokens(tokens, topk), topk)
            known[tokens, topk] = workspace_bytes(weights, tokens, topk, own)
        return known[tokens, topk]
    arena = WorkspaceArena()
    Buffers.carve(weights, part_tokens(tokens, topk), topk, tiling, arena)
    return arena.size_bytes


def kernels_for(weights: Fp8BlockWeights, tokens: int, topk: int) -> tuple[object, ...]:
    """Equal for calls that run the same kernels.

    The sort is compiled for the next power of two of the slots, and Triton compiles apart for
    numbers that are 1 or multiples of 16: here tokens, slots, and the row stride of the scales.
    """
    tokens = part_tokens(tokens, topk)
    slots = tokens * topk
    sort = (slots - 1).bit_length() if slots <= ONE_LAUNCH_SLOTS else chunk_of(slots)
    beside = slots <= BESIDE_SLOTS
    tiling = weights.tiling(tokens, topk)
    multiples = tuple(number % 16 == 0 for number in (tokens, slots, _row_stride(slots)))
    return tiling, _routed(tiling, slots), sort, beside, multiples, tokens == 1, tokens <= 64, topk


def _plan(weights: Fp8BlockWeights, tokens: int, topk: int, workspace: Tensor) -> Fp8BlockPlan:
    """A plan in `workspace`: one that was made before, where that has not moved."""
    key = (tokens, topk, workspace.data_ptr())
    plans = weights._plans
    plan = plans.get(key)
    if plan is None:
        plan = Fp8BlockPlan(weights, tokens, topk, workspace=workspace)
        if not torch.cuda.is_current_stream_capturing():  # that workspace is the graph's own
            # A copy, and pop: another thread may be at the same.
            for old, other in list(plans.items()):
                if other.workspace() is None or len(plans) >= _PLANS_KEPT:
                    plans.pop(old, None)
            plans[key] = plan
    return plan


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What the kernels of a call hand on, in a workspace.

    Attributes:
        routing: the sorted routing.
        x: float8_e4m3fn [rows, H], the tokens in the order of the experts; or [M, H], as they
            come, where the first GEMM gathers.
        x_scale: float32 [ceil(H / 128), row stride]; or [M, ceil(H / 128) to a multiple of 4].
        act: float8_e4m3fn [rows, Ip], between the GEMMs.
        act_scale: float32 [Ip / 128, row stride].
        y: bfloat16 [rows, H], the experts' results.
    """

    routing: SortedRouting
    x: Tensor
    x_scale: Tensor
    act: Tensor
    act_scale: Tensor
    y: Tensor

    @staticmethod
    def carve(
        weights: Fp8BlockWeights, tokens: int, topk: int, tiling: Tiling, arena: WorkspaceArena
    ) -> Buffers:
        """Those of a call of [tokens, topk] slots, at most MAX_SLOTS."""
        slots = tokens * topk
        H, I = weights.hidden, weights.intermediate
        rows = max_rows(slots, weights.experts, 1)
        stride = _row_stride(rows)
        return Buffers(
            routing=arena.sorted_routing(slots, _grouping(weights, tiling)),
            x=arena.empty(tokens if tiling.gather else rows, H, dtype=torch.float8_e4m3fn),
            x_scale=arena.empty(
                *((tokens, -(-H // 512) * 4) if tiling.gather else (-(-H // 128), stride)),
                dtype=torch.float32,
            ),
            act=arena.empty(rows, I, dtype=torch.float8_e4m3fn),
            act_scale=arena.empty(I // 128, stride, dtype=torch.float32),
            y=arena.empty(rows, H, dtype=torch.bfloat16),
        )


class Fp8BlockPlan:
    """Kernels and buffers for calls of exactly `tokens` tokens with `topk` slots each.

    Args:
        weights: the experts.
        tokens: M, at least 1; M * T at most MAX_SLOTS.
        topk: T, at least 1.
        workspace: uint8, at least `workspace_bytes`.
        tiling: by default the weights' own; `workspace` is then as large as that wants.
    """

    def __init__(
        self,
        weights: Fp8BlockWeights,
        tokens: int,
        topk: int,
        *,
        workspace: Tensor,
        tiling: Tiling | None = None,
    ) -> None:
        slots = tokens * topk
        self.tiling = weights.tiling(tokens, topk) if tiling is None else tiling
        self.buffers = Buffers.carve(weights, tokens, topk, self.tiling, WorkspaceArena(workspace))
        self.workspace = ref(workspace)
        self.grouping = _grouping(weights, self.tiling)
        self._routed = _routed(self.tiling, slots)
        self._launches: dict[tuple[object, ...], tuple[Relaunch, Relaunch]] = {}
        b = self.buffers
        H, I = weights.hidden, weights.intermediate
        self.gate_up = GroupedGemm(
            GemmConfig(
                quantized=True,
                gated=weights.act_fn.gated,
                act=weights.act_fn.name,
                limited=weights.act_fn.limit is not None,
                bias=weights.bias13 is not None,
                routed=self._routed,
                gather=topk if self.tiling.gather else 0,
                rows=self.tiling.rows,
                extra=self.tiling.extra,
                split=self.tiling.split13,
                pair=self.tiling.pair,
                K=H,
                n_out=I,
                n_real=weights.w2.shape[2],
                w_rows=weights.w13.shape[1],
            ),
            weight=weights.w13,
            weight_scale=weights.w13_scale,
            x=b.x,
            x_scale=b.x_scale,
            slot_of_row=b.routing.slot_of_row if self.tiling.gather else None,
            tiles=b.routing.tiles,
            tile_count=b.routing.tile_count,
            units_taken=b.routing.units_taken[:1],
            out=b.act,
            out_scale=b.act_scale,
            bias=weights.bias13,
            act_fn=weights.act_fn,
        )
        self.down = GroupedGemm(
            GemmConfig(
                quantized=False,
                gated=False,
                bias=weights.bias2 is not None,
                rows=self.tiling.rows,
                extra=self.tiling.extra,
                split=self.tiling.split2,
                pair=self.tiling.pair,
                K=weights.w2.shape[2],
                n_out=H,
                w_rows=H,
            ),
            weight=weights.w2,
            weight_scale=weights.w2_scale,
            x=b.act,
            x_scale=b.act_scale,
            tiles=b.routing.tiles,
            tile_count=b.routing.tile_count,
            units_taken=b.routing.units_taken[1:],
            out=b.y,
            out_scale=None,
            bias=weights.bias2,
        )

    def prepare(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> Relaunch | None:
        """First launches: sort, quantize, and permute where the first GEMM does not gather.

        Returns:
            See `quantize_permute.prepare`.
        """
        if self._routed:
            self.gate_up.route(topk_ids, expert_map)
        b = self.buffers
        if hidden_scale is not None:
            sort_routing(topk_ids, b.routing, self.grouping, expert_map=expert_map)
            if self.tiling.gather:
                b.x.copy_(hidden)
                b.x_scale[:, : hidden_scale.shape[1]].copy_(hidden_scale)
            else:
                copy_rows(hidden, hidden_scale, b.routing.row_of_slot, b.x, b.x_scale)
            return None
        if self.tiling.gather:
            sort_and_quantize(
                hidden, topk_ids, b.routing, b.x, b.x_scale, self.grouping, expert_map=expert_map
            )
            return None
        return prepare(
            hidden, topk_ids, b.routing, b.x, b.x_scale, self.grouping, expert_map=expert_map
        )

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
        y, row_of_slot = self.buffers.y, self.buffers.routing.row_of_slot
        kinds = None
        if hidden_scale is None:
            kinds = _kinds(hidden, topk_weights, topk_ids, out, expert_map)
            known = None if kinds is None else self._launches.get(kinds)
            if known is not None:
                ids_map = topk_ids if expert_map is None else expert_map
                if self._routed:
                    self.gate_up.route(topk_ids, expert_map)
                known[0](hidden, topk_ids, ids_map, stream=stream)
                self.gate_up(stream)
                self.down(stream)
                known[1](y, row_of_slot, topk_weights, out, stream=stream)
                return
        first = self.prepare(hidden, topk_ids, expert_map, hidden_scale)
        self.gate_up(stream)
        self.down(stream)
        last = weighted_reduce(y, row_of_slot, topk_weights, out)
        if kinds is not None and first is not None and last is not None:
            self._launches[kinds] = first.keeping_all_but(3), last.keeping_all_but(4)


def _kinds(
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    out: Tensor,
    expert_map: Tensor | None,
) -> tuple[object, ...] | None:
    """What the Triton kernels of a call are compiled for, beside the plan; None where unaligned."""
    addresses = hidden.data_ptr() | topk_weights.data_ptr() | topk_ids.data_ptr() | out.data_ptr()
    mapped: tuple[object, ...] = ()
    if expert_map is not None:
        addresses |= expert_map.data_ptr()
        mapped = expert_map.dtype, expert_map.shape[0]
    if addresses % 16:
        return None
    return hidden.dtype, topk_weights.dtype, topk_ids.dtype, out.dtype, mapped


def _grouping(weights: Fp8BlockWeights, tiling: Tiling) -> Grouping:
    return Grouping(experts=weights.experts, tile_rows=tiling.rows, extra_rows=tiling.extra)


def _row_stride(rows: int) -> int:
    """Between the groups of a scale: multiples of 16 bytes."""
    return -(-rows // 4) * 4


def _routed(tiling: Tiling, slots: int) -> bool:
    return tiling.rows == 8 and slots <= ROUTED_SLOTS
