"""Tasks run on GPUs until all have ended or no time is left."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import environment
import needs
from placement import Placement
from process import Process
from results import INTERRUPTED, NOT_STARTED, SKIPPED, TIMED_OUT, Result, last_line, of_ended
from task import in_order

if TYPE_CHECKING:
    from pathlib import Path

    from task import Task

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class _Running:
    task: Task
    gpus: list[int]
    process: Process
    log: Path
    began: float
    limit_s: float
    cut: bool
    """Whether the end of the time, and not the task's own, is its limit."""

    def seconds(self):
        return round(time.monotonic() - self.began)


class Queue:
    """Runs tasks; results are kept after each.

    Args:
        tasks: to be run, with every task they come after that has not passed.
        machine: see `Machine`.
        results: see `Results`.
        out: folder for logs, in a folder for each task.
        folder: folder for checkpoints.
        minutes: in which all is over; None if that does not matter.
        say: receives a line for each task that starts or ends.
    """

    def __init__(self, tasks, machine, results, *, out, folder, minutes=None, say=print):
        self._machine, self._results = machine, results
        self._out, self._folder, self._say = out, folder, say
        self._end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self._waiting = in_order(tasks)
        self._running = []
        self._needed = {name for task in tasks for name in task.after}
        self._unmet = {task.name: needs.why_not(task, machine) for task in tasks}
        self._placement = Placement([gpu.index for gpu in machine.gpus])
        self._stopped = False

    def stop(self):
        """Let `run` end what runs, and return; may be called by a signal's handler."""
        self._stopped = True

    def run(self):
        """Run all."""
        try:
            while not self._stopped:
                self._keep_ended()
                self._skip()
                self._start()
                if not self._running and not self._waiting:
                    return
                time.sleep(_POLL_S)
        finally:
            self._keep_ended()
            for running in self._running:
                self._end_process(running)
                self._keep(running.task, self._ended(running, INTERRUPTED))

    def _keep_ended(self):
        for running in list(self._running):
            late = time.monotonic() - running.began >= running.limit_s
            returncode = running.process.returncode()
            if returncode is None and not late:
                continue
            self._end_process(running)
            self._running.remove(running)
            self._placement.give_back(running.task)
            self._keep(running.task, self._ended(running, TIMED_OUT if returncode is None else ""))

    def _end_process(self, running):
        if left := running.process.end():
            self._say(f"{running.task.name}: processes {left} cannot be ended")

    def _ended(self, running, status):
        last, seconds = last_line(running.log), running.seconds()
        if not status:
            return of_ended(running.process.returncode(), last, gpus=running.gpus, seconds=seconds)
        reason = "the time of the whole run was over" if running.cut and status == TIMED_OUT else ""
        return Result(status=status, gpus=running.gpus, seconds=seconds, reason=reason, last=last)

    def _keep(self, task, result):
        self._results.keep(task.name, result)
        words = f": {result.reason}" if result.reason else f" after {result.seconds} s"
        self._say(f"{task.name} {result.status}{words}")

    def _skip(self):
        """Skip what cannot run any more, and then what waits for it."""
        found = True
        while found:
            found = [(task, reason) for task in self._waiting if (reason := self._why_not(task))]
            for task, reason in found:
                self._waiting.remove(task)
                self._keep(task, Result(status=SKIPPED, reason=reason))
        for task in [task for task in self._waiting if self._is_late(task)]:
            self._waiting.remove(task)
            reason = f"needs about {task.estimate_s} s, but less time is left"
            self._keep(task, Result(status=NOT_STARTED, reason=reason))

    def _is_late(self, task):
        return time.monotonic() + task.estimate_s > self._end

    def _why_not(self, task):
        if reason := self._unmet[task.name]:
            return reason
        for name in task.after:
            if not self._is_coming(name) and not self._results.passed(name):
                return f"needs {name}, which has not passed"
        if task.name in self._needed and not any(task.name in t.after for t in self._waiting):
            return "nothing that can run needs it"
        writing = any(running.task.room_gb for running in self._running)
        if not writing and not self._has_room(task):
            return f"needs {task.room_gb} GB in {self._folder}"
        return None

    def _is_coming(self, name):
        """Whether a task waits or runs; in an earlier run it may have passed."""
        tasks = [*self._waiting, *(running.task for running in self._running)]
        return any(task.name == name for task in tasks)

    def _has_room(self, task):
        """Whether its files have room beside those that running tasks write."""
        if not task.room_gb:
            return True
        taken_gb = sum(running.task.room_gb for running in self._running)
        return shutil.disk_usage(self._folder).free / 1e9 >= task.room_gb + taken_gb

    def _start(self):
        ready = [task for task in self._waiting if not any(map(self._is_coming, task.after))]
        for task, gpus in self._placement.choose(filter(self._has_room, ready), time.monotonic()):
            self._waiting.remove(task)
            self._running.append(self._begin(task, gpus))
            self._say(f"{task.name} starts on GPU {', '.join(map(str, gpus))}")

    def _begin(self, task, gpus):
        out = self._out / task.name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        cores = self._machine.cores_of(gpus)
        log, began = out / "log", time.monotonic()
        with log.open("wb") as file:
            started = Process(
                environment.script_of(
                    task, gpus, machine=self._machine, folder=self._folder, out=out
                ),
                folder=environment.CHECKOUT,
                environment=environment.of_task(
                    task, gpus, folder=self._folder, cores=len(cores)
                ),
                cores=cores,
                log=file,
            )  # fmt: skip
        left_s = self._end - began
        return _Running(
            task=task,
            gpus=gpus,
            process=started,
            log=log,
            began=began,
            limit_s=min(task.most_s, left_s),
            cut=left_s < task.most_s,
        )
