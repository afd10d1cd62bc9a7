"""What a GPU does in a step, from what a profiler saw."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from moequant.benchmarks import device_profile as module
from moequant.benchmarks.device_profile import (
    NOTHING,
    DeviceProfile,
    covered_ns,
    profile_call,
    profile_of_step,
)


@pytest.mark.parametrize(
    ("spans", "covered"),
    [
        ([], 0),
        ([(5, 9)], 4),
        ([(5, 9), (20, 21)], 5),
        ([(5, 9), (7, 12)], 7),
        ([(6, 7), (5, 9), (8, 9)], 4),
        ([(5, 9), (9, 12), (5, 9)], 7),
    ],
)
def test_what_runs_at_once_counts_once(spans, covered):
    assert covered_ns(spans) == covered


class Event:
    def __init__(self, name, start, duration, device=DeviceType.CUDA):
        self.name, self.start_ns, self.duration_ns, self.device_type = (
            lambda value=value: value for value in (name, start, duration, device)
        )


def test_a_profile_has_the_kernels_of_the_device(monkeypatch):
    events = [
        Event("gemm", 1000, 4000),
        Event("reduce", 4000, 2000),
        Event("gemm", 10000, 3000),
        Event("cudaGraphLaunch", 0, 9000, DeviceType.CPU),
        Event("marker", 0, 0),
    ]
    results = SimpleNamespace(events=lambda: events)
    called = []
    profiler = SimpleNamespace(
        start=lambda: called.append("start"),
        stop=lambda: called.append("stop"),
        profiler=SimpleNamespace(kineto_results=results),
    )
    monkeypatch.setattr(module, "profile", lambda activities: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: called.append("wait"))
    found = profile_call(lambda: called.append("call"))
    assert called == ["wait", "start", "call", "wait", "stop"]
    assert found.busy_us == 8.0
    assert found.kernel_us == {"gemm": 7.0, "reduce": 2.0}
    assert found.launches == {"gemm": 2, "reduce": 1}


def test_a_step_is_what_more_steps_take_more():
    few = DeviceProfile(busy_us=100.0, kernel_us={"gemm": 60.0}, launches={"gemm": 3})
    many = DeviceProfile(
        busy_us=900.0,
        kernel_us={"copy": 40.0, "gemm": 460.0},
        launches={"copy": 4, "gemm": 11},
    )
    assert profile_of_step(few, many, 4) == {
        "busy_ms": 0.2,
        "kernels": [
            {"name": "gemm", "ms": 0.1, "launches": 2.0},
            {"name": "copy", "ms": 0.01, "launches": 1.0},
        ],
    }


def test_the_kernels_with_most_time_are_kept():
    kernel_us = {f"kernel {i}": float(i) for i in range(100)}
    found = profile_of_step(
        NOTHING,
        DeviceProfile(busy_us=1.0, kernel_us=kernel_us, launches=dict.fromkeys(kernel_us, 1)),
        1,
    )
    assert [kernel["name"] for kernel in found["kernels"]] == [
        f"kernel {i}" for i in range(99, 79, -1)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_profiler_sees_kernels_of_a_graph():
    x = torch.randn(1024, 1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    (x @ x).sum()
    with torch.cuda.graph(graph):
        for _ in range(3):
            (x @ x).sum()
    found = profile_call(graph.replay)
    assert sum(found.launches.values()) >= 6
    assert 0 < found.busy_us <= sum(found.kernel_us.values()) * 1.001
