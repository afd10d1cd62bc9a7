"""Medians of graph replays, and this machine's ceilings."""

from __future__ import annotations

import statistics

import torch

DEVICE = torch.device("cuda")


def graph_time(calls, replays=20):
    """Median microseconds of one of `calls`, captured together and replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def read_tb_per_s():
    """Bandwidth of a sum over 4 GiB."""
    x = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE).normal_()
    return x.nbytes / graph_time([x.sum], 10) / 1e6


def fp8_tflops():
    """Rate of torch's FP8 GEMM of 8192 x 8192 x 8192, one scale a tensor."""
    a, b = (torch.randn(8192, 8192, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)

    def multiply():
        torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return 2 * 8192**3 / graph_time([multiply], 10) / 1e6
