"""Times of CUDA-graph replays, and peak rates of the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


Name = TypeVar("Name", bound=Hashable)

REPLAYS = 20
TURNS = 4
"""Turns over which the replays are spread."""
WARM_S = 0.02
"""Time of replays before the first turn: the first 4 ms after a GPU was idle are up to 10 % slower,
and tens of milliseconds at full load bring it to its power limit."""
REST_S = 0.3
"""Rest before a turn, if asked for: at full load an H200 reaches its power limit within tens of
milliseconds and lowers its clocks from then on."""


@dataclass(frozen=True, kw_only=True)
class Time:
    """Microseconds: median, and 20th and 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Peak rates of this GPU.

    Attributes:
        read_tb_per_s: of a sum over 4 GiB.
        fp8_tflops: of torch's FP8 GEMM of 8192 x 8192 x 8192, one scale per tensor; None if the GPU
            has no FP8.
        bf16_tflops: of torch's BF16 GEMM of the same size.
    """

    read_tb_per_s: float
    fp8_tflops: float | None
    bf16_tflops: float


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of `calls`, one after the other; each is called twice first, which compiles it."""
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_interleaved(
    contenders: Mapping[Name, Sequence[Callable[[], object]]], *, rests: bool = False
) -> dict[Name, Time]:
    """Time of one call of each contender: a graph of all its calls, replayed REPLAYS times.

    They take TURNS turns. With `rests`, the GPU rests for REST_S before a turn; else it is warm.
    """
    graphs = {name: capture(calls) for name, calls in contenders.items()}
    if not rests:
        for graph in graphs.values():
            until = time.perf_counter() + WARM_S
            while time.perf_counter() < until:
                graph.replay()
                torch.cuda.synchronize()
    times: dict[Name, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            if rests:
                time.sleep(REST_S)
            turn = [_replay_us(graph) / len(contenders[name]) for _ in range(REPLAYS // TURNS)]
            times[name] += turn
    return {name: _time(values) for name, values in times.items()}


def host_time_us(call: Callable[[], object], calls: int = 100) -> float:
    """Median time that a call takes on the host while the GPU is idle."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure peak rates, of a GPU that has rested; takes about four seconds and 5 GB."""
    read = measure_read_tb_per_s(device)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    bf16 = _tflops(lambda: a @ b.T)
    fp8 = None
    if torch.cuda.get_device_capability(device) >= (8, 9):
        a8, b8 = (t.to(torch.float8_e4m3fn) for t in (a, b))
        one = torch.ones((), device=device)
        fp8 = _tflops(
            lambda: torch._scaled_mm(
                a8, b8.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
    return Ceilings(read_tb_per_s=read, fp8_tflops=fp8, bf16_tflops=bf16)


def measure_read_tb_per_s(device: torch.device, size_bytes: int = 4 << 30) -> float:
    """Bandwidth of a sum over `size_bytes`, which should be many times the L2 cache."""
    x = torch.empty(size_bytes // 4, dtype=torch.float32, device=device).normal_()
    return x.nbytes / _median_us(x.sum) / 1e6


def _tflops(multiply: Callable[[], object]) -> float:
    return float(2 * 8192**3 / _median_us(multiply, rests=True) / 1e6)


def _median_us(call: Callable[[], object], *, rests: bool = False) -> float:
    return time_interleaved({"": [call]}, rests=rests)[""].median_us


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1000)


def _time(values: Sequence[float]) -> Time:
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Time(median_us=statistics.median(values), p20_us=fifths[0], p80_us=fifths[-1])
