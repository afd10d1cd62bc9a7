"""Turns, rests and medians, with graphs whose replays take a known time."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from moequant.benchmarks import cuda_timing
from moequant.benchmarks.cuda_timing import (
    REPLAYS,
    REST_S,
    TURNS,
    WARM_S,
    host_time_us,
    time_interleaved,
)

SLOW_US, FAST_US = 30.0, 10.0


class Clock:
    """What happens on the GPU: captured calls, replays, rests."""

    def __init__(self):
        self.us = 0.0
        self.events = []
        self.capturing = None


@pytest.fixture
def clock(monkeypatch):
    now = Clock()

    class Graph:
        def __init__(self):
            self.calls = []

        def replay(self):
            for us, _ in self.calls:
                now.us += us
            now.events.append(self.calls[0][1])

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now.us

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at - self.at) / 1000

    @contextmanager
    def capture(graph):
        now.capturing = graph
        yield
        now.capturing = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    time = SimpleNamespace(sleep=now.events.append, perf_counter=lambda: now.us / 1e6)
    monkeypatch.setattr(cuda_timing, "time", time)
    return now


def kernel(clock, name, us):
    def call():
        if clock.capturing is not None:
            clock.capturing.calls.append((us, name))

    return call


def test_contenders_take_turns_and_the_time_is_of_one_call(clock):
    slow, fast = kernel(clock, "slow", SLOW_US), kernel(clock, "fast", FAST_US)
    times = time_interleaved({"slow": [slow, fast], "fast": [fast]})
    assert times["slow"].median_us == pytest.approx((SLOW_US + FAST_US) / 2)
    assert times["fast"].median_us == pytest.approx(FAST_US)
    assert times["fast"].p20_us == pytest.approx(times["fast"].p80_us)
    turns = [(name, len(list(replays))) for name, replays in groupby(clock.events[2:])]
    warm = dict(turns[:2])
    for name, us in (("slow", SLOW_US + FAST_US), ("fast", FAST_US)):
        assert WARM_S * 1e6 <= warm[name] * us <= WARM_S * 1e6 + 2 * us
    assert turns[2:] == [("slow", REPLAYS // TURNS), ("fast", REPLAYS // TURNS)] * TURNS


def test_the_gpu_rests_in_front_of_every_turn(clock):
    time_interleaved({"a": [kernel(clock, "a", 1.0)]}, rests=True)
    assert clock.events == ["a", *([REST_S] + ["a"] * (REPLAYS // TURNS)) * TURNS]


def test_host_time_is_of_the_call_alone(monkeypatch, clock):
    at = iter([0.0, 1e-6, 5.0, 5.0 + 3e-6, 9.0, 9.0 + 2e-6])
    monkeypatch.setattr(cuda_timing, "time", SimpleNamespace(perf_counter=lambda: next(at)))
    assert host_time_us(lambda: None, calls=3) == pytest.approx(2.0)
