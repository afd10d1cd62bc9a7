"""What became of each task, kept in a file after every change."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field

PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"
SKIPPED, INTERRUPTED, NOT_STARTED = "skipped", "interrupted", "not started"
_ALL_SKIPPED = re.compile(r"=* ?\d+ skipped(, \d+ \w+)* in ")
_LAST_CHARACTERS = 100
_TAIL_BYTES = 20_000


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a task; `reason` of one that did not run, `last` line of what it printed."""

    status: str
    gpus: list[int] = field(default_factory=list)
    seconds: int = 0
    reason: str = ""
    last: str = ""


class Results:
    """By name of the task, those of earlier runs included; in results.json of a folder."""

    def __init__(self, out, machine=None):
        self._file = out / "results.json"
        self._gpus = [gpu.name for gpu in machine.gpus] if machine else []
        kept = json.loads(self._file.read_text())["tasks"] if self._file.exists() else {}
        self.tasks = {name: Result(**fields) for name, fields in kept.items()}

    def passed(self, name):
        """Whether a task has passed, in this run or an earlier one."""
        return name in self.tasks and self.tasks[name].status == PASSED

    def keep(self, name, result):
        """Add a result, and write the file, of which there is always a whole one."""
        self.tasks[name] = result
        document = {"gpus": self._gpus, "tasks": {n: asdict(r) for n, r in self.tasks.items()}}
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(self._file)

    def exit_code(self, names):
        """0 if of these tasks some passed and all others were skipped, else 1."""
        found = {self._of(name).status for name in names}
        return 0 if PASSED in found and found <= {PASSED, SKIPPED} else 1

    def table(self, names):
        """Lines of a table of the results of these tasks."""
        rows = [("task", "GPUs", "s", "result", "")]
        for name in names:
            found = self._of(name)
            gpus = ",".join(map(str, found.gpus))
            rows.append((name, gpus, str(found.seconds or ""), found.status, _words(found)))
        return format_table(rows)

    def _of(self, name):
        return self.tasks.get(name, Result(status=NOT_STARTED))


def _words(result):
    return result.reason or result.last[:_LAST_CHARACTERS]


def format_table(rows):
    """Lines with columns of equal width; numbers of seconds, the third, end at one place."""
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    for row in rows:
        cells = [
            cell.rjust(width) if place == 2 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        yield "   ".join([*cells, row[-1]]).rstrip()


def last_line(log):
    """The last line in a log that is not empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def of_ended(returncode, last, **fields):
    """The result of a task that ended by itself: skipped if pytest skipped all of its tests."""
    if returncode == 0 and _ALL_SKIPPED.match(last):
        return Result(status=SKIPPED, reason=f"pytest: {last}; the log says why", **fields)
    return Result(status=FAILED if returncode else PASSED, last=last, **fields)
