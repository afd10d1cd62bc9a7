"""What a call of the backend sm90_fp8_block consists of: its tiling, its launches one by one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, cast

import torch

from moequant.benchmarks.cuda_timing import time_interleaved
from moequant.errors import UnsupportedError
from moequant.runtime.call import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from moequant.benchmarks.layers import Inputs
    from moequant.kernels.fp8_block.sm90_fp8_fused import Fp8BlockPlan
    from moequant.runtime import FusedExperts
    from moequant.runtime.backends.sm90_fp8_block import Sm90Fp8BlockExperts

BACKEND = "sm90_fp8_block"
"""The one that has tilings and stages."""

_CALLS = 4
"""Of a stage in a graph: a launch is short."""


def check_has_stages(experts: FusedExperts) -> None:
    """Ask whether its launches can be timed one by one.

    Raises:
        UnsupportedError: another backend runs the experts.
    """
    if experts.chosen_backend() != BACKEND:
        raise UnsupportedError(
            f"stages are known of {BACKEND}, not of {experts.chosen_backend()!r}; leave them out"
        )


def timed_tiling(experts: FusedExperts, tokens: int, topk: int) -> dict[str, int | bool] | None:
    """The tiling of a call, or of its parts if it runs in parts; None of other backends."""
    if experts.chosen_backend() != BACKEND:
        return None
    weights = cast("Sm90Fp8BlockExperts", experts.packed()).kernel_weights
    return asdict(weights.tiling(_part(experts, tokens, topk), topk))


def time_stages(experts: FusedExperts, call: Inputs, *, rests: bool) -> dict[str, float]:
    """Microseconds of each launch of a call, or of its first part, by itself.

    In a call they overlap. The GEMMs' are with that of a launch which sets their counter to 0.
    """
    from moequant.kernels.fp8_block.sm90_fp8_fused import Fp8BlockPlan, workspace_bytes

    weights = cast("Sm90Fp8BlockExperts", experts.packed()).kernel_weights
    part = _part(experts, *call.ids.shape)
    hidden, topk_weights, ids = (t[:part] for t in call.arguments)
    topk, out = ids.shape[1], torch.empty_like(hidden)
    size_bytes = workspace_bytes(weights, part, topk)
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device=hidden.device)
    plan = Fp8BlockPlan(weights, part, topk, workspace=workspace)
    plan(hidden, topk_weights, ids, out)
    stages = _stages(plan, (hidden, topk_weights, ids, out))
    times = time_interleaved({n: [stage] * _CALLS for n, stage in stages.items()}, rests=rests)
    return {name: time.median_us for name, time in times.items()}


def _part(experts: FusedExperts, tokens: int, topk: int) -> int:
    """Tokens of the first part of a call."""
    from moequant.kernels.calls import part_tokens

    return part_tokens(-(-tokens // parts_of(tokens, experts.max_tokens)), topk)


def _stages(plan: Fp8BlockPlan, call: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], object]]:
    """The launches of a plan that has been called, by name; `sort` is a part of `prepare`."""
    from moequant.kernels.routing import sort_routing
    from moequant.kernels.sm90.quantize_permute import FEW_SLOTS
    from moequant.kernels.weighted_reduce import weighted_reduce

    hidden, topk_weights, ids, out = call
    buffers, routing = plan.buffers, plan.buffers.routing

    def again(gemm: Callable[[int], None]) -> None:
        routing.units_taken.zero_()
        gemm(torch.cuda.current_stream().cuda_stream)

    def sort() -> None:
        sort_routing(ids, routing, plan.grouping)

    stages: dict[str, Callable[[], object]] = {
        "prepare": lambda: plan.prepare(hidden, ids),
        "gate_up": lambda: again(plan.gate_up),
        "down": lambda: again(plan.down),
        "reduce": lambda: weighted_reduce(buffers.y, routing.row_of_slot, topk_weights, out),
    }
    if ids.numel() > FEW_SLOTS[128]:
        stages["sort"] = sort
    return stages
