"""Run everything of this project that needs a GPU, on all GPUs of this machine at once.

    python tests/gpu_checks/run.py [--only NAME,...] [--list] [--minutes N] [--out DIR]

Results and logs are kept in the folder --out, after every task. With the same folder once more,
what has not passed is run, and nothing else. Tasks that lack something are skipped, with the
reason. The exit code is 0 if all that ran has passed, 2 for wrong options, and else 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import checkpoints
import layer_times
import model_times
import needs
import tests_on_gpus
from environment import CHECKOUT
from gpu_queue import Queue
from machine import this_machine
from results import Results, format_table
from task import in_order, with_what_they_need

TASKS = [*tests_on_gpus.TASKS, *layer_times.TASKS, *checkpoints.TASKS, *model_times.TASKS]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own in it
ROOM_GB = sum(model.room_gb for model in checkpoints.MODELS.values())


def parse(words):
    """The parser, and what a command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME,...", help="names, or patterns such as 'sm90-*'")
    parser.add_argument("--list", action="store_true", help="print the tasks, and run nothing")
    parser.add_argument("--minutes", type=float, help="start nothing that takes longer")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for results and logs")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR",
        help="for checkpoints, which are kept there; by default a temporary folder",
    )  # fmt: skip
    return parser, parser.parse_args(words)


def selected(tasks, patterns):
    """Names of tasks; without patterns those that need not be named.

    Raises:
        ValueError: no name matches a pattern.
    """
    if patterns is None:
        return [task.name for task in tasks if not task.by_name]
    names = [task.name for task in tasks]
    found = {p: [name for name in names if fnmatch(name, p)] for p in patterns.split(",")}
    if unknown := [pattern for pattern, matches in found.items() if not matches]:
        raise ValueError(f"no task is called {', '.join(unknown)}; see --list")
    return [name for name in names if any(name in matches for matches in found.values())]


def left(tasks, names, results, folder):
    """The tasks of these names that have not passed, and those whose files they need again."""
    found = with_what_they_need([name for name in names if not results.passed(name)], tasks)
    lost = [task for task in found if not all((folder / path).exists() for path in task.makes)]
    return [task for task in found if task in lost or not results.passed(task.name)]


def listing(tasks, machine):
    """Lines of a table of tasks, in the order in which they wait."""
    rows = [("task", "GPUs", "s", "needs", "here")]
    for task in in_order(tasks):
        gpus = str(task.gpus) if task.beside == 1 else f"1/{task.beside}"
        wanted = ", ".join([*task.needs, *task.after]) or "-"
        rows.append((task.name, gpus, str(task.estimate_s), wanted, _here(task, machine)))
    return format_table(rows)


def _here(task, machine):
    return needs.why_not(task, machine) or "runs"


@contextmanager
def folder_of(given):
    """For checkpoints: the folder given, or one that is deleted, in memory if there is room."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM_GB * 1e9
    place = SHARED_MEMORY if roomy else None
    with tempfile.TemporaryDirectory(prefix="moequant-gpu-checks-", dir=place) as name:
        yield Path(name)


def check_installed():
    """Whether children will find the package whole, not only its folder in the checkout."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import moequant.cli, pytest, xdist"]
    return subprocess.run(command, cwd=CHECKOUT, env=environment, check=False).returncode == 0


_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopped_by_signals(queue):
    """Within it, an interruption stops the queue."""
    before = {number: signal.getsignal(number) for number in _INTERRUPTIONS}
    # nohup, for example, has one ignored.
    heard = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, lambda *_: queue.stop())
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def run(tasks, names, machine, given):
    """Run tasks, print a table, and return the exit code."""
    out = (given.out or Path(time.strftime("gpu-checks-%Y%m%d-%H%M%S"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out, machine)
    with folder_of(given.folder) as folder:
        queue = Queue(
            left(tasks, names, results, folder), machine, results,
            out=out, folder=folder, minutes=given.minutes,
        )  # fmt: skip
        with stopped_by_signals(queue):
            queue.run()
    shown = [task.name for task in with_what_they_need(names, tasks)]
    print("", *results.table(shown), "", sep="\n")
    print(f"Logs and results: {out}; the same with --out {out} runs what has not passed.")
    return results.exit_code(shown)


def main(words, tasks=TASKS, machine=None):
    """See the head of this file; `tasks` and `machine` are others in tests."""
    parser, given = parse(words)
    try:
        machine = machine or this_machine()
        names = selected(tasks, given.only)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        print(*listing(with_what_they_need(names, tasks), machine), sep="\n")
        return 0
    if not check_installed():
        parser.error("moequant is not installed with its tests' packages; see CONTRIBUTING.md")
    return run(tasks, names, machine, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
