"""Find the fastest tiling of the FP8 block kernels for layers, and keep it for every later call.

Candidates take turns, as contenders of `bench experts` do. The tiling that calls have now stays
unless another is faster by more than runs differ. Each is checked before it is timed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from moequant.benchmarks.cuda_timing import time_interleaved
from moequant.benchmarks.experts import RESTS_FROM, check_output, checked_tokens, inputs_of
from moequant.benchmarks.layers import random_experts
from moequant.benchmarks.machine import cuda_device
from moequant.benchmarks.stages import BACKEND
from moequant.errors import MoequantError, UnsupportedError
from moequant.progress import SilentProgress
from moequant.runtime import FusedExperts
from moequant.storage.disk import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from moequant.benchmarks.shapes import LayerShape
    from moequant.kernels.fp8_block.tuning import Tiling, TuningProblem
    from moequant.progress import Progress
    from moequant.runtime.backends.sm90_fp8_block import Sm90Fp8BlockExperts

_MARGIN = 0.99
"""Of the time of the tiling that calls have now, what another must stay under: medians of 20
replays differ by up to half a percent from run to run."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A tiling that was timed, and the microseconds of a call with it."""

    tiling: dict[str, Any]
    time_us: float


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """One number of tokens of a layer.

    Attributes:
        shape: what the layer was called.
        tokens: M.
        before: the tiling that calls had.
        after: the one that was kept, the same or a faster one.
        tried: every tiling that was timed, the fastest first.
    """

    shape: str
    tokens: int
    before: Tried
    after: Tried
    tried: list[Tried]


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """What a run found, and the table it wrote."""

    gpu: str
    path: str
    cells: list[Tuned]


class Layer(Protocol):
    """A layer whose calls can be timed with any tiling."""

    def problem(self, tokens: int) -> TuningProblem:
        """What a tiling of calls of `tokens` tokens is for."""

    def times_us(self, tokens: int, tilings: Sequence[Tiling]) -> dict[Tiling, float]:
        """Microseconds of a call of `tokens` tokens, by tiling.

        Raises:
            NumericsError: a tiling computes something else.
        """


def tune(
    shapes: Mapping[str, LayerShape],
    tokens: Sequence[int],
    *,
    device: torch.device | str = "cuda",
    path: Path | None = None,
    progress: Progress | None = None,
) -> TuningResult:
    """Time the candidates for every M, and write the fastest to a table that calls look into.

    The table is written after each M, so what was found until then outlives an interruption.

    Args:
        shapes: sizes of the layers, by what the result calls them.
        tokens: the M to tune; calls of up to 1.5 times more or fewer tokens use the same tiling.
        device: a CUDA device of SM90.
        path: of the table; by default the user's, which wins over the one that moequant brings.
        progress: told of every M.

    Raises:
        UnsupportedError: no such device, the backend does not run a layer there, more tokens than
            it runs at once, or a file at `path` that is no table of this GPU.
        NumericsError: a tiling computes something else than the experts.
        MoequantError: the table cannot be written, which is asked before anything is timed.
        OSError: the table could be written when that was asked, and can no longer be.
    """
    place = cuda_device(device)
    from moequant.kernels.fp8_block.tuning import user_table, write_table

    gpu = torch.cuda.get_device_name(place)
    _check_tokens(shapes, tokens)
    if path is not None:
        _check_table(path, gpu)
    path = path or user_table(gpu)
    _check_can_be_written(path)
    report = progress or SilentProgress()
    report.start("tuning", len(shapes) * len(tokens), unit="sizes")
    cells = []
    for name, shape in shapes.items():
        layer: Layer = CudaLayer(shape, place)
        for problem, now in _problems(layer, tokens):
            cell, kept = _tune(name, layer, problem, now)
            path = write_table(gpu, [(problem, kept, cell.after.time_us)], path)
            cells.append(cell)
            report.advance(1, f"{name}, {problem.tokens} tokens")
        del layer  # before the next takes as much memory
    report.finish()
    return TuningResult(gpu=gpu, path=str(path), cells=cells)


class CudaLayer:
    """A layer of random experts on a CUDA device of SM90, as a `Layer`."""

    def __init__(self, shape: LayerShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        weights = random_experts(shape, "fp8_block", device)
        self._experts = FusedExperts(weights, backend=BACKEND)
        self._packed = cast("Sm90Fp8BlockExperts", self._experts.packed()).kernel_weights

    def problem(self, tokens: int) -> TuningProblem:
        """See `Layer`."""
        return self._packed.problem(tokens, self._shape.topk)

    def times_us(self, tokens: int, tilings: Sequence[Tiling]) -> dict[Tiling, float]:
        """See `Layer`; on a workspace of NaN, where a first call is compared with the reference."""
        from moequant.kernels.fp8_block.sm90_fp8_fused import Fp8BlockPlan, workspace_bytes

        topk = self._shape.topk
        with torch.cuda.device(self._device):
            inputs = inputs_of(self._shape, tokens, self._device)
            pick = checked_tokens(tokens, self._device)
            reference = FusedExperts(self._experts.weights, backend="torch_reference")
            want = reference(*(t[pick] for t in inputs[0].arguments))
            size_bytes = max(workspace_bytes(self._packed, tokens, topk, t) for t in tilings)
            workspace = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            out = torch.empty_like(inputs[0].hidden)
            calls = {}
            for tiling in tilings:
                plan = Fp8BlockPlan(self._packed, tokens, topk, workspace=workspace, tiling=tiling)
                workspace.fill_(0xFF)
                out.fill_(float("nan"))
                plan(*inputs[0].arguments, out)
                check_output(f"{tiling} at {tokens} tokens", out, want, pick)
                calls[tiling] = [lambda p=plan, c=call: p(*c.arguments, out) for call in inputs]
            times = time_interleaved(calls, rests=tokens >= RESTS_FROM)
        return {tiling: time.median_us for tiling, time in times.items()}


def _check_tokens(shapes: Mapping[str, LayerShape], tokens: Iterable[int]) -> None:
    from moequant.kernels.calls import part_tokens

    for M in tokens:
        for name, shape in shapes.items():
            if (part := part_tokens(M, shape.topk)) != M:
                raise UnsupportedError(
                    f"{M} tokens of {name} run in parts of {part}; tune at most so many"
                )


def _check_table(path: Path, gpu: str) -> None:
    """Ask, before anything is timed, whether a table can be written to `path` without a loss."""
    from moequant.kernels.fp8_block.tuning import FORMAT

    if not path.exists():
        return
    try:
        table = json.loads(path.read_bytes())
        if (table["format"], table["gpu"]) == (FORMAT, gpu):
            return
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UnsupportedError(
        f"{path} is there, and is no table of tilings of {gpu}; name another file, or remove it"
    )


def _check_can_be_written(path: Path) -> None:
    """Ask, before anything is timed, whether a table can be written to `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoequantError(
            f"{path.parent}: cannot be made: {error.strerror}; name another file for the table"
        ) from error
    check_writable(path)


def _problems(layer: Layer, tokens: Iterable[int]) -> list[tuple[TuningProblem, Tiling]]:
    """What each M is, and the tiling that its calls have now."""
    from moequant.kernels.fp8_block.tuning import default_tiling, tiling_for

    def now(problem: TuningProblem) -> Tiling:
        try:
            return tiling_for(problem)
        except MoequantError:  # of a broken table, which says to tune again
            return default_tiling(problem)

    return [(problem, now(problem)) for problem in map(layer.problem, tokens)]


def _tune(name: str, layer: Layer, problem: TuningProblem, now: Tiling) -> tuple[Tuned, Tiling]:
    from moequant.kernels.fp8_block.tuning import candidates

    tilings = list(dict.fromkeys([now, *candidates(problem)]))
    us = layer.times_us(problem.tokens, tilings)
    order = sorted(us, key=us.__getitem__)
    kept = order[0] if us[order[0]] < _MARGIN * us[now] else now
    tried = {tiling: Tried(tiling=asdict(tiling), time_us=us[tiling]) for tiling in order}
    cell = Tuned(
        shape=name,
        tokens=problem.tokens,
        before=tried[now],
        after=tried[kept],
        tried=list(tried.values()),
    )
    return cell, kept
