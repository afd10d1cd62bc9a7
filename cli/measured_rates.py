"""Rates of earlier conversions on this machine, from which a plan says how long it will take.

They are kept in moequant/rates.json in the user's cache folder, $XDG_CACHE_HOME or ~/.cache. A plan
is right without them, so what cannot be read or written is no error.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path

LEAST_BYTES = 1_000_000_000
"""Of smaller conversions, the time says more of their start than of a rate."""


def remember_rate(kind: str, size_bytes: int, seconds: float) -> None:
    """Keep the rate of a conversion of `size_bytes`, unless it was a small one.

    Args:
        kind: what was converted, such as "hub nvfp4".
        size_bytes: size of the source.
        seconds: time that it took.
    """
    if size_bytes < LEAST_BYTES or seconds <= 0:
        return
    rates = {**_read(), kind: size_bytes / seconds}
    path = _path()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(rates, indent=2))
        partial.replace(path)


def expected_seconds(sizes: dict[str, int]) -> float | None:
    """The time that parts of these kinds and sizes take; None if a rate is not known."""
    rates = _read()
    if not all(kind in rates for kind, size_bytes in sizes.items() if size_bytes):
        return None
    return sum(size_bytes / rates[kind] for kind, size_bytes in sizes.items() if size_bytes)


def duration(seconds: float) -> str:
    """A time as text, to two digits or so: 0.2 s, 40 s, 12 min, 3.5 h."""
    if seconds < 10:
        return f"{max(seconds, 0.1):.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or os.path.expanduser("~/.cache")) / "moequant" / "rates.json"  # noqa: PTH111


def _read() -> dict[str, float]:
    """The rates in bytes per second by kind; none if the file is missing or not ours."""
    try:
        found = json.loads(_path().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: r for k, r in found.items() if isinstance(r, float) and 0 < r < math.inf}
