"""A process with all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

_MARK = "MOEQUANT_GPU_CHECK"


class Process:
    """A script of bash, on some cores. What it starts inherits a variable, by which it is found.

    Engines and servers start processes in groups and sessions of their own, which outlive a parent
    that crashes.

    Args:
        script: command lines.
        folder: in which to run.
        environment: all of its variables.
        cores: numbers of processor cores.
        log: an open file for what it prints.
    """

    def __init__(self, script, *, folder, environment, cores, log):
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._mark = f"{_MARK}={mark}".encode()
        self._bash = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env={**environment, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )

    def returncode(self):
        """The script's, None while it runs."""
        return self._bash.poll()

    def end(self, within_s=30.0):
        """Kill what is left of the script and of all that it started.

        Returns:
            Numbers of processes that are still there after that time: a driver may hold them.
        """
        self._bash.kill()
        until = time.monotonic() + within_s
        while (started := self._started()) and time.monotonic() < until:
            for pid in started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if not started:
            self._bash.wait()
        return started

    def _started(self):
        """Processes with the variable; those that have ended have none."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found
