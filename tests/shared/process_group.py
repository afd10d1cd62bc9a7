"""Processes that were started with `start_new_session`, and so with a group of their own."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def end_group(process):
    """End what is left of a process and of those it started, which would hold memory of the GPU."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
