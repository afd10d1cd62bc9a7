"""What is checked or timed on GPUs: command lines, and what they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True)
class Task:
    """Command lines that run one after the other until one fails.

    In them stand {python}, {out} (a folder for this task's files), {folder} (of checkpoints),
    {cores}, and {jobs} and {large_jobs}: processes of pytest, for small tests and for layers of
    real models' sizes.

    Attributes:
        name: also the name of the folder of its log.
        commands: for bash, run in the checkout.
        estimate_s: seconds it is expected to take.
        limit_s: seconds after which it is ended; by default, three times as many.
        gpus: number of GPUs.
        beside: how many such tasks one GPU runs at once; 1 for what is timed.
        needs: names in `needs.NEEDS`.
        after: tasks that must have passed.
        makes: what it leaves for others in {folder}.
        room_gb: space that it takes there.
        environment: names and values of variables that others do not have.
        by_name: whether it is run only if --only names it.
        safe_path: whether Python leaves the folder of a script out of its path, so that `moequant`
            is the installed package. Tests whose scripts import what is beside them need False.
    """

    name: str
    commands: tuple[str, ...]
    estimate_s: int
    limit_s: int = 0
    gpus: int = 1
    beside: int = 1
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    room_gb: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    by_name: bool = False
    safe_path: bool = True

    @property
    def most_s(self):
        """Seconds after which it is ended."""
        return self.limit_s or 3 * self.estimate_s


def in_order(tasks):
    """Tasks sorted by how long they take GPUs together with what waits for them, longest first."""
    waiting = {task.name: [other for other in tasks if task.name in other.after] for task in tasks}

    @cache
    def chain_s(task):
        return task.gpus * task.estimate_s + max(
            (chain_s(other) for other in waiting[task.name]), default=0
        )

    return sorted(tasks, key=chain_s, reverse=True)


def with_what_they_need(names, tasks):
    """The tasks of these names, and those they come after."""
    by_name = {task.name: task for task in tasks}
    found, open_names = set(), list(names)
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += by_name[name].after
    return [task for task in tasks if task.name in found]
