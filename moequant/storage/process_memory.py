"""How much memory this process has held."""

from __future__ import annotations

import resource
import sys


def peak_resident_bytes() -> int:
    """The most bytes that this process has held in memory, file pages of libraries among them."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
