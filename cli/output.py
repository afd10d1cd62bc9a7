"""What a command prints: results on stdout, progress and warnings on stderr.

The only module that imports rich, and only when there is something to print.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import click

from moequant.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from moequant.progress import Progress

_NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"
_MAX_FOLDED_ROWS = 500
"""Longer tables are not folded to the terminal: rich needs a second for a few thousand rows."""


class Output:
    """Prints the output of one command, according to --json and --quiet."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(
        self, document: Mapping[str, Any], show: Callable[[Output, Mapping[str, Any]], None]
    ) -> None:
        """Print a command's result: the document as JSON, or by `show` as text."""
        if self.as_json:
            print_document(document)
        elif not self.quiet:
            show(self, document)

    def warn(self, message: str) -> None:
        """Print a warning."""
        click.echo(printable(f"Warning: {message}"), err=True)

    def line(self, text: str = "") -> None:
        """Print a line of a result."""
        click.echo(printable(text))

    def fields(self, fields: Mapping[str, object]) -> None:
        """Print names and values, one pair per line."""
        width = max(map(len, fields))
        for name, value in fields.items():
            self.line(f"{name:<{width}}  {value}")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table; a column whose name begins with `>` is right-aligned.

        On a terminal, cells are folded to its width. Elsewhere, and in long tables, each row is one
        line, so that names can be searched for.
        """
        lines = list(rows)
        if sys.stdout.isatty() and len(lines) <= _MAX_FOLDED_ROWS:
            _print_folded(columns, lines)
        else:
            for line in _align(columns, lines):
                self.line(line)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Progress bars on stderr if it is a terminal, else no output."""
        if self.as_json or self.quiet:
            # Also disables download bars: the hub library reads this when it is imported, later.
            os.environ[_NO_BARS] = "1"
        if sys.stderr is None or not sys.stderr.isatty() or _bars_disabled():
            yield SilentProgress()
            return
        bars = _make_bars()
        try:
            yield _BarProgress(bars)
        finally:
            bars.stop()


class _BarProgress:
    """A bar for the current task; none before it starts, when a download may show its own."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def start(self, description: str, total: int, *, unit: str = "bytes") -> None:
        """Show a new bar."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(description, total=total, current="", unit=unit)
        self._bars.start()

    def advance(self, done: int, current: str) -> None:
        """Advance the bar."""
        if self._task is not None:
            self._bars.update(self._task, advance=done, current=current)

    def finish(self) -> None:
        """Clear the name of the current item."""
        if self._task is not None:
            self._bars.update(self._task, current="")


def _print_folded(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    Console(markup=False, highlight=False, emoji=False).print(table)


def _align(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    titles = [column.removeprefix(">") for column in columns]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = zip(row, widths, columns, strict=True)
        aligned = (
            text.rjust(width) if column.startswith(">") else text.ljust(width)
            for text, width, column in cells
        )
        yield "   ".join(aligned).rstrip()


def _make_bars() -> Bars:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Done(DownloadColumn):
        def render(self, task: Task) -> Text:
            if task.fields["unit"] == "bytes":
                return super().render(task)
            return Text(f"{task.completed:.0f}/{task.total:.0f} {task.fields['unit']}")

    class Speed(TransferSpeedColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.fields["unit"] == "bytes" else Text()

    class Current(TextColumn):
        """The only column that shrinks: it is cut to the width that the others leave."""

        def render(self, task: Task) -> Text:
            return Text(task.fields["current"], no_wrap=True, overflow="ellipsis")

    def whole() -> Column:
        return Column(no_wrap=True)

    return Progress(
        TextColumn("{task.description}", markup=False, table_column=whole()),
        BarColumn(bar_width=20, table_column=whole()),
        Done(table_column=whole()),
        Speed(table_column=whole()),
        TimeRemainingColumn(table_column=whole()),
        Current("", table_column=Column()),
        console=Console(stderr=True),
        transient=True,
    )


def _bars_disabled() -> bool:
    """Whether the hub library's environment variable disables bars; it accepts these values."""
    return os.environ.get(_NO_BARS, "").upper() in ("1", "ON", "YES", "TRUE")


def print_document(document: Mapping[str, Any]) -> None:
    """Print a JSON document on stdout; a command prints only one."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def printable(text: str) -> str:
    """The text with control characters escaped, because names in files may be hostile."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def size(size_bytes: int) -> str:
    """A number of bytes as text, in decimal units as on the hub: 4.5 GB."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(number: int, noun: str) -> str:
    """A number of things as text: 1 shard, 2 shards."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as text: 0, 3-5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"
