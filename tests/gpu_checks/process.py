"""A process with all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path


def start(script, *, folder, environment, cores, log):
    """Run a script of bash in a process group of its own, on these cores.

    Args:
        script: command lines.
        folder: in which to run.
        environment: all of its variables.
        cores: numbers of processor cores.
        log: an open file for what it prints.
    """
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
    )


def end(process):
    """Kill a process, its group, and all that it started in other groups; engines do that."""
    started = _descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid):
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                # Behind the name, which may hold anything: state, parent.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, open_pids = [], [pid]
    while open_pids:
        started = children.get(open_pids.pop(), [])
        found += started
        open_pids += started
    return found
