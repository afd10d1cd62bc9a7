"""Find the fastest tiling of the FP8 block kernels for a layer, and keep it for every later call.

Candidates take turns, as contenders of `bench experts` do. The formula's tiling stays unless
another is faster by more than runs differ.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from moequant.benchmarks.cuda_timing import time_interleaved
from moequant.benchmarks.experts import cuda_device, inputs_of
from moequant.benchmarks.layers import random_experts
from moequant.errors import UnsupportedError
from moequant.progress import SilentProgress
from moequant.runtime import FusedExperts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moequant.benchmarks.layers import Inputs
    from moequant.benchmarks.shapes import LayerShape
    from moequant.kernels.fp8_block.experts import Fp8BlockWeights
    from moequant.kernels.fp8_block.tuning import Problem, Tiling
    from moequant.progress import Progress

BACKEND = "sm90_fp8_block"
"""The one whose tilings are chosen from a table."""

_MARGIN = 0.99
"""Of the formula's time, what another tiling must stay under: medians of 20 replays differ by up to
half a percent from run to run."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """One number of tokens.

    Attributes:
        tokens: M.
        tiling: the one that was kept.
        time_us: its time.
        default_us: that of the formula's tiling.
        candidates: how many were timed.
    """

    tokens: int
    tiling: dict[str, Any]
    time_us: float
    default_us: float
    candidates: int


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """What a run found, and the table it wrote."""

    shape: str
    gpu: str
    path: str
    cells: list[Tuned]


def tune(
    shape: LayerShape,
    tokens: Sequence[int],
    *,
    device: torch.device | str = "cuda",
    path: Path | None = None,
    progress: Progress | None = None,
) -> TuningResult:
    """Time the candidates for every M, and write the fastest to a table that calls look into.

    Args:
        shape: sizes of the layer.
        tokens: the M to tune; calls of up to 1.5 times more or fewer tokens use the same tiling.
        device: a CUDA device of SM90.
        path: of the table; by default the user's, which wins over the one that moequant brings.
        progress: told of every M.

    Raises:
        UnsupportedError: no such device, the backend does not run the layer there, or more tokens
            than it runs at once.
        OSError: the table cannot be written.
    """
    place = cuda_device(device)
    from moequant.kernels.fp8_block.tuning import write_table

    _check_tokens(tokens, shape.topk)
    experts = FusedExperts(random_experts(shape, "fp8_block", place), backend=BACKEND)
    packed = cast("Fp8BlockWeights", experts.packed_weights())
    report = progress or SilentProgress()
    report.start("tuning", len(tokens), unit="sizes")
    found = []
    for M in tokens:
        found.append(_tune(packed, shape, inputs_of(shape, M, place)))
        report.advance(1, f"{M} tokens")
    report.finish()
    gpu = torch.cuda.get_device_name(place)
    written = write_table(gpu, [(problem, best, us[best]) for problem, best, us in found], path)
    return TuningResult(
        shape=str(shape),
        gpu=gpu,
        path=str(written),
        cells=[
            Tuned(
                tokens=problem.tokens,
                tiling=asdict(best),
                time_us=us[best],
                default_us=next(iter(us.values())),
                candidates=len(us),
            )
            for problem, best, us in found
        ],
    )


def _check_tokens(tokens: Sequence[int], topk: int) -> None:
    from moequant.kernels.fp8_block.experts import part_tokens

    for M in tokens:
        if part_tokens(M, topk) != M:
            raise UnsupportedError(
                f"{M} tokens run in parts of {part_tokens(M, topk)}; tune at most so many"
            )


def _tune(
    weights: Fp8BlockWeights, shape: LayerShape, inputs: Sequence[Inputs]
) -> tuple[Problem, Tiling, dict[Tiling, float]]:
    """The problem, its fastest tiling, and the time of each, the formula's first."""
    from moequant.kernels.fp8_block.experts import Plan, workspace_bytes
    from moequant.kernels.fp8_block.tuning import candidates

    M = inputs[0].hidden.shape[0]
    problem = weights.problem(M, shape.topk)
    out = torch.empty_like(inputs[0].hidden)
    plans = {}
    for tiling in candidates(problem):
        size_bytes = workspace_bytes(weights, M, shape.topk, tiling)
        workspace = torch.empty(size_bytes, dtype=torch.uint8, device=out.device)
        plan = Plan(weights, M, shape.topk, workspace=workspace, tiling=tiling)
        plans[tiling] = [lambda p=plan, c=call: p(*c.arguments, out) for call in inputs]
    times = time_interleaved({str(tiling): calls for tiling, calls in plans.items()})
    us = {tiling: times[str(tiling)].median_us for tiling in plans}
    default, fastest = next(iter(us)), min(us, key=us.__getitem__)
    return problem, fastest if us[fastest] < _MARGIN * us[default] else default, us
