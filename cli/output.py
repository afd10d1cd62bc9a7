"""What a command prints: results on stdout, progress and warnings on stderr.

The only module that knows rich, and it loads rich when there is something to print.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from moequant.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.progress import Progress as Bars

    from moequant.progress import Progress

_PIPE_WIDTH = 1000
"""Columns to fill where no terminal says: a name cut in two cannot be searched for."""


class Output:
    """Prints for one command, as its --json and --quiet ask."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(
        self, document: Mapping[str, Any], show: Callable[[Output, Mapping[str, Any]], None]
    ) -> None:
        """Print a command's result: the document as JSON, or as `show` puts it for people."""
        if self.as_json:
            click.echo(json.dumps(document, indent=2, allow_nan=False))
        elif not self.quiet:
            show(self, document)

    def warn(self, message: str) -> None:
        """Print a warning."""
        click.echo(f"Warning: {message}", err=True)

    def line(self, text: str = "") -> None:
        """Print a line of a result."""
        click.echo(text)

    def fields(self, fields: Mapping[str, object]) -> None:
        """Print names and values, a line each."""
        width = max(map(len, fields))
        for name, value in fields.items():
            self.line(f"{name:<{width}}  {value}")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table; a column named with a leading `>` is aligned to the right."""
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE, pad_edge=False, show_edge=False, header_style="bold")
        for column in columns:
            right = column.startswith(">")
            table.add_column(
                column.removeprefix(">"), justify="right" if right else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(*row)
        console = Console(markup=False, highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        console.print(table)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Bars on stderr while people watch it, silence otherwise."""
        hidden = self.as_json or self.quiet or _bars_disabled() or not sys.stderr.isatty()
        if hidden:
            yield SilentProgress()
            return
        with _make_bars() as bars:
            yield _BarProgress(bars)


class _BarProgress:
    """A bar a task."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=None, visible=False, current="")

    def start(self, description: str, total_bytes: int) -> None:
        """Show a new bar."""
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(description, total=total_bytes, current="")

    def advance(self, done_bytes: int, current: str) -> None:
        """Move the bar on."""
        self._bars.update(self._task, advance=done_bytes, current=current)

    def finish(self) -> None:
        """Take what is being worked on away."""
        self._bars.update(self._task, current="")


def _make_bars() -> Bars:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn(
            "{task.fields[current]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        ),
        console=Console(stderr=True),
        transient=True,
    )


def _bars_disabled() -> bool:
    """Whether the hub's own variable asks for no bars, spelt as the hub spells it."""
    value = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "")
    return value.upper() in ("1", "ON", "YES", "TRUE")


def size(size_bytes: int) -> str:
    """Bytes for people, in decimal units as on the hub: 4.5 GB."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(number: int, noun: str) -> str:
    """A number of things for people: 1 shard, 2 shards."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
