"""Whether memory of a server grows, from the middle of a time to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

WINDOWS = ((0.4, 0.6), (0.8, 1.0))
"""The middle and the end of the time, in shares of it."""
GPU_GROWTH_BYTES = 64 << 20
"""vLLM takes its memory when it starts; what torch's allocator takes later comes in blocks of 2 to
20 MiB, and all kinds of requests have come before the middle of the time."""
HOST_LEAK_BYTES = 4096
"""That the server's processes may keep of a request: less is no leak that this finds.

docs/serving.md has 28,562 and 26,493 requests in ten minutes, 48 and 44 a second: 11,400 and 10,600
in the 40 % of the time between the ends of the windows, so that 47 and 43 MB are allowed for them.
"""
HOST_NOISE_BYTES = 26 << 20
"""That they may grow however few requests there were.

In those two runs, of which no leak is known, they grew by 6 and 13 MB. Two runs do not say how far
others are from them, so it is twice the larger. With 11,400 requests a leak of 4096 B + 26 MiB /
11,400 = 6.5 kB a request is found, whatever the noise; in a short run, only a larger one.
"""


class Sample(NamedTuple):
    """Memory of a server at a time.

    Attributes:
        seconds: since the first request.
        requests: that had ended.
        gpu_bytes: of the GPUs, None if unknown.
        host_bytes: of the server's processes.
    """

    seconds: float
    requests: int
    gpu_bytes: int | None
    host_bytes: int


@dataclass
class Record:
    """Samples, the earliest first, of a time of so many seconds."""

    samples: list = field(default_factory=list)
    seconds: float = 0.0

    def in_windows(self, part):
        """The largest number of samples within each window; None where there is none."""
        return [self._largest(part, *(share * self.seconds for share in w)) for w in WINDOWS]

    def _largest(self, part, begin, end):
        within = [getattr(s, part) for s in self.samples if begin <= s.seconds <= end]
        return max((number for number in within if number is not None), default=None)

    def allowed_host_growth(self):
        """Bytes by which the processes may grow from the end of one window to that of the other."""
        before, after = (number or 0 for number in self.in_windows("requests"))
        return HOST_LEAK_BYTES * (after - before) + HOST_NOISE_BYTES

    def problems(self, *, gpu_known):
        """Whose memory grew, or was not measured: of the GPU, that is one only if it is known."""
        return [
            *_growth("the GPU", *self.in_windows("gpu_bytes"), GPU_GROWTH_BYTES, known=gpu_known),
            *_growth(
                "the server's processes",
                *self.in_windows("host_bytes"),
                self.allowed_host_growth(),
                known=True,
            ),
        ]


def _growth(name, before, after, allowed, *, known):
    if before is None or after is None:
        return [f"memory of {name} was not measured"] if known else []
    if after <= before + allowed:
        return []
    return [
        f"memory of {name} grew from {before / 1e6:.0f} to {after / 1e6:.0f} MB, more than the "
        f"{allowed / 1e6:.0f} MB allowed"
    ]
