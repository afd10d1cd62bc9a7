"""Memory may grow by what is known not to be a leak, and by no more."""

from __future__ import annotations

import pytest
from memory_growth import Record, Sample

LEVEL = 4 << 30


def memory_problems(gpu, host, *, seconds=100, requests_per_s=0):
    """Of a time with so much memory at each second."""
    samples = [Sample(t, requests_per_s * t, gpu(t), host(t)) for t in range(seconds + 1)]
    return Record(samples, seconds).problems(gpu_known=False)


def test_memory_is_compared_between_the_middle_and_the_end():
    assert not memory_problems(lambda t: LEVEL, lambda t: LEVEL)
    # What is taken in the first half is no leak, nor is what goes up and down.
    assert not memory_problems(
        lambda t: LEVEL * min(t, 40), lambda t: LEVEL * min(t, 40) + (t % 7) * (10 << 20)
    )
    (gpu,) = memory_problems(lambda t: LEVEL + t * (2 << 20), lambda t: LEVEL)
    assert gpu.startswith("memory of the GPU grew")
    (host,) = memory_problems(lambda t: None, lambda t: LEVEL + t * (8 << 20))
    assert host.startswith("memory of the server's processes grew")


@pytest.mark.parametrize(
    ("leak", "noise", "found"),
    [(0, 13e6, False), (2048, 13e6, False), (8192, 0, True), (8192, 13e6, True)],
)
def test_a_leak_of_each_request_is_found_at_the_rate_that_was_served(leak, noise, found):
    """Ten minutes of 48 requests a second; the noise comes between the ends of the windows."""

    def host(t):
        return int(LEVEL + 48 * t * leak + noise * max(0, t - 360) / 240)

    problems = memory_problems(lambda t: None, host, seconds=600, requests_per_s=48)
    assert [p.partition(" grew")[0] for p in problems] == (
        ["memory of the server's processes"] if found else []
    )


def test_memory_that_was_not_measured_is_a_problem():
    assert Record([], 10).problems(gpu_known=True) == [
        "memory of the GPU was not measured",
        "memory of the server's processes was not measured",
    ]
    assert len(Record([], 10).problems(gpu_known=False)) == 1
