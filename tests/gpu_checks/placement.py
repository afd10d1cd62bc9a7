"""Which GPUs a task gets."""

from __future__ import annotations

from fractions import Fraction
from math import inf


class Placement:
    """Shares of GPUs that are taken.

    Tasks are placed in the order in which they wait. The first that does not fit holds the GPUs
    that are expected to be free first, so that it gets them however many small tasks follow: these
    are placed there only if they are expected to end before it can start.
    """

    def __init__(self, gpus):
        self._running = {gpu: {} for gpu in gpus}
        """By GPU and name: the share, and the time at which the task is expected to end."""

    def take(self, task, gpus, now):
        """A task starts on these GPUs."""
        for gpu in gpus:
            self._running[gpu][task.name] = Fraction(1, task.beside), now + task.estimate_s

    def give_back(self, task):
        """It has ended."""
        for tasks in self._running.values():
            tasks.pop(task.name, None)

    def choose(self, waiting, now):
        """Yield each task that can start with its GPUs, which it takes."""
        held = {}
        for task in waiting:
            fitting = [
                gpu
                for gpu in self._running
                if self._taken(gpu) + Fraction(1, task.beside) <= 1
                and now + task.estimate_s <= held.get(gpu, inf)
            ]
            if len(fitting) >= task.gpus:
                # Small tasks together, so that others find GPUs without any.
                chosen = sorted(fitting, key=self._taken, reverse=True)[: task.gpus]
                self.take(task, sorted(chosen), now)
                yield task, sorted(chosen)
            elif not held:
                held = self._hold(task, now)

    def _hold(self, task, now):
        """The GPUs that a task waits for, and when it is expected to start on them."""
        soonest = sorted(self._running, key=lambda gpu: self._free_at(gpu, now))[: task.gpus]
        start = max(self._free_at(gpu, now) for gpu in soonest)
        return dict.fromkeys(soonest, start)

    def _taken(self, gpu):
        return sum(share for share, _ in self._running[gpu].values())

    def _free_at(self, gpu, now):
        return max([now, *(end for _, end in self._running[gpu].values())])
