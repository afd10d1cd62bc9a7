"""What a call consists of: its tiling, and its launches one by one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from moequant.benchmarks.cuda_timing import time_interleaved
from moequant.errors import UnsupportedError
from moequant.runtime.backends import PackedExperts

if TYPE_CHECKING:
    from moequant.benchmarks.layers import Inputs
    from moequant.runtime import FusedExperts

_CALLS = 4
"""Of a stage in a graph: a launch is short."""


def check_has_stages(experts: FusedExperts) -> None:
    """Ask whether its launches can be timed one by one.

    Raises:
        UnsupportedError: their backend does not say what it launches.
    """
    if type(experts.packed()).stages is PackedExperts.stages:
        raise UnsupportedError(
            f"backend {experts.chosen_backend()!r} does not say which launches a call has; leave "
            "the stages out, or name another backend"
        )


def timed_tiling(experts: FusedExperts, tokens: int, topk: int) -> dict[str, int | bool] | None:
    """The tiling of a call, or of its largest part; None where there is no choice."""
    tuner = experts.packed().tuner
    if tuner is None:
        return None
    return asdict(tuner.tilings(experts.part_sizes(tokens, topk)[0], topk)[0])


def time_stages(experts: FusedExperts, call: Inputs, *, rests: bool) -> dict[str, float]:
    """Microseconds of each launch of a call, or of its first part, timed separately.

    In a call they overlap. The GEMMs' are with that of a launch which sets their counter to 0.
    """
    part, *_ = experts.part_sizes(*call.ids.shape)
    stages = experts.packed().stages(*(t[:part] for t in call.arguments))
    times = time_interleaved({n: [stage] * _CALLS for n, stage in stages.items()}, rests=rests)
    return {name: time.median_us for name, time in times.items()}
