"""What a GPU does during a step of decoding, by torch's profiler.

Kernels overlap: one that was launched early waits for the one in front of it. So the sum of their
times is more than the time in which the GPU is busy, where what runs at once counts once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_MOST_KERNELS = 20
"""Of a profile, those with the most time."""


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """What ran on the GPU.

    Attributes:
        busy_us: microseconds in which anything ran.
        kernel_us: microseconds by name of a kernel or copy, of all its launches.
        launches: their number, by name.
    """

    busy_us: float
    kernel_us: Mapping[str, float]
    launches: Mapping[str, int]


class DeviceProfiler:
    """A profile of what the current CUDA device runs between `start` and `stop`."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begin, once the device has ended what it runs."""
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> DeviceProfile:
        """What ran since `start`, once all of it has ended."""
        torch.cuda.synchronize()
        self._profile.stop()
        assert self._profile.profiler is not None
        results = self._profile.profiler.kineto_results
        assert results is not None
        kernel_us: defaultdict[str, float] = defaultdict(float)
        launches: Counter[str] = Counter()
        spans = []
        for event in results.events():
            if event.device_type() != DeviceType.CUDA or event.duration_ns() <= 0:
                continue
            kernel_us[event.name()] += event.duration_ns() / 1e3
            launches[event.name()] += 1
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        busy_us = covered_ns(spans) / 1e3
        return DeviceProfile(busy_us=busy_us, kernel_us=kernel_us, launches=launches)


def profile_call(call: Callable[[], object]) -> DeviceProfile:
    """What `call` ran on the current CUDA device, once all of it has ended."""
    profiler = DeviceProfiler()
    profiler.start()
    try:
        call()
    finally:
        found = profiler.stop()
    return found


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds that lie in at least one of the spans, each from a start to an end."""
    covered = reached = 0
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return covered


def profile_of_step(few: DeviceProfile, many: DeviceProfile, steps: int) -> dict[str, Any]:
    """What one of `steps` steps takes that `many` has more than `few`.

    Returns:
        `busy_ms`, and `kernels`, those with the most time: `name`, `ms` and `launches` a step.
    """
    kernels: list[dict[str, Any]] = [
        {
            "name": name,
            "ms": (us - few.kernel_us.get(name, 0.0)) / steps / 1e3,
            "launches": (many.launches[name] - few.launches.get(name, 0)) / steps,
        }
        for name, us in many.kernel_us.items()
    ]
    kernels.sort(key=lambda kernel: kernel["ms"], reverse=True)
    return {
        "busy_ms": (many.busy_us - few.busy_us) / steps / 1e3,
        "kernels": kernels[:_MOST_KERNELS],
    }


NOTHING = DeviceProfile(busy_us=0.0, kernel_us={}, launches={})
"""What `profile_of_step` is given as `few` for a call as a whole."""
