"""How many cores there are to work on."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may use, fewer than the machine has in a container or under taskset.

    Where the system does not say which these are, all of the machine's.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
