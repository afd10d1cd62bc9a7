"""What a command prints: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from contextlib import contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO

import click

from moequant.cli.tables import table_lines
from moequant.progress import SilentProgress
from moequant.units import NEVER_RUN as NEVER_RUN
from moequant.units import count as count
from moequant.units import first_of
from moequant.units import ranges as ranges
from moequant.units import size as size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moequant.errors import MoequantError
    from moequant.progress import Progress
    from moequant.storage.checkpoint import Checkpoint

_COLUMNS = 80
_NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"


def print_warnings_of(ours: type[Warning]) -> None:
    """From now on, print Python's warnings of a category as commands print theirs."""
    as_python_does = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if issubclass(category, ours):
            Output().warn(str(message))
        else:
            as_python_does(message, category, filename, lineno, file, line)

    warnings.showwarning = show


class Output:
    """Prints the output of one command, according to --json and --quiet."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(
        self, document: Mapping[str, Any], show: Callable[[Output, Mapping[str, Any]], None] | None
    ) -> None:
        """Print a command's result: the document as JSON, or by `show` as text.

        `show` is None if the text was printed while the command worked.
        """
        if self.as_json:
            print_document(document)
        elif show is not None and not self.quiet:
            show(self, document)

    def warn(self, *messages: str) -> None:
        """Print warnings."""
        for message in messages:
            click.echo(printable(f"Warning: {message}"), err=True)

    def line(self, text: str = "") -> None:
        """Print a line of a result."""
        click.echo(printable(text))

    def fields(self, fields: Mapping[str, object]) -> None:
        """Print names and values, one pair per line."""
        width = max(map(len, fields))
        for name, value in fields.items():
            self.line(f"{name:<{width}}  {value}")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; a column whose name begins with `>` is right-aligned.

        A row is one line, but on a terminal that is too narrow for it: see `table_lines`.
        """
        # Of a command whose stdout is closed, Python has none.
        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if on_terminal else None
        cells = ([printable(str(cell)) for cell in row] for row in rows)
        for line in table_lines(columns, cells, width):
            self.line(line)

    def folded(self, text: str, *, indent: int = 0) -> None:
        """Print a paragraph in lines of at most 80 columns; names and paths are never split."""
        lead = " " * indent
        lines = wrap(
            text, _COLUMNS, initial_indent=lead, subsequent_indent=f"{lead}  ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        for line in lines:
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
        bar = _BarProgress()
        try:
            yield bar
        finally:
            bar.finish()


class _BarProgress:
    """A bar for the current task; none before it starts, when a download may show its own."""

    def __init__(self) -> None:
        self._bar: Any = None

    def start(self, description: str, total: int, *, unit: str = "bytes") -> None:
        """Replace the bar of the task before."""
        from tqdm import tqdm

        self.finish()
        in_bytes = unit == "bytes"
        self._bar = tqdm(
            desc=description,
            total=total,
            unit="B" if in_bytes else f" {unit}",
            unit_scale=in_bytes,
            file=sys.stderr,
            dynamic_ncols=True,
            leave=False,
            smoothing=0,  # the mean rate since the task began, which summaries tell, too
        )

    def advance(self, done: int, current: str) -> None:
        """Show the amount done, and the item that was finished."""
        if self._bar is not None:
            with self._bar.get_lock():  # tqdm's own addition is not atomic
                self._bar.set_postfix_str(printable(current), refresh=False)
                self._bar.update(done)

    def finish(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bars_disabled() -> bool:
    """Whether the hub library's environment variable disables bars; it accepts these values."""
    return os.environ.get(_NO_BARS, "").upper() in ("1", "ON", "YES", "TRUE")


def print_document(document: Mapping[str, Any]) -> None:
    """Print a JSON document on stdout; a command prints only one."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


class KeptDocument:
    """The file of --output, written again after every part of what takes long.

    Attributes:
        error: why it could not be written the last time; the figures that were measured are to be
            printed all the same.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.error: MoequantError | None = None

    def __call__(self, document: Mapping[str, Any]) -> None:
        """Write the document, if a file is named."""
        from moequant.errors import MoequantError
        from moequant.storage.disk import replace_file

        self.error = None
        if self._path is None:
            return
        try:
            text = json.dumps(document, indent=1, allow_nan=False)
            replace_file(self._path, text.encode() + b"\n")
        except MoequantError as error:
            self.error = error


def write_plot(path: Path | None, draw: Callable[[], str]) -> MoequantError | None:
    """Draw into a file, if one is named.

    Returns:
        Why it could not be written; the figures that were measured are to be printed all the same.
    """
    from moequant.errors import MoequantError
    from moequant.storage.disk import replace_file

    try:
        if path is not None:
            replace_file(path, draw().encode())
    except MoequantError as error:
        return error
    return None


def printable(text: str) -> str:
    """The text with control characters escaped, because names in files may be hostile."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def origin_of(checkpoint: Checkpoint) -> dict[str, str | None]:
    """The repository and the commit of a checkpoint on the hub; None of one in a directory."""
    from moequant.storage.hub_folder import HubFolder

    folder = checkpoint.folder
    if not isinstance(folder, HubFolder):
        return {"repository": None, "commit": None}
    return {"repository": folder.repository.repo_id, "commit": folder.repository.commit}


def quantization(dialect: str | None, formats: Sequence[str]) -> str:
    """How the weights of a checkpoint are quantized; `dialect` is that of its config.json."""
    if dialect is None:
        return "none"
    if not formats:
        return f"none found, though config.json says {dialect}"
    return f"{', '.join(formats)}, as {dialect}"


_NAMES_SHOWN = 3


def warnings_of_numbers(not_finite: Sequence[str]) -> Iterator[str]:
    """A warning about the copied tensors that hold NaN or Inf; none without such tensors."""
    if not_finite:
        yield (
            f"{count(len(not_finite), 'copied tensor')} with NaN or Inf, as in the source: "
            f"{first_of(not_finite, _NAMES_SHOWN)}. Unless it is a mask, the model may "
            "compute NaN: correct the source or fetch it again, and convert again with --overwrite"
        )


def show_requantization_errors(out: Output, errors: Iterable[Mapping[str, Any]]) -> None:
    """Print a row for each kind of weight that was quantized before: exact, or its error."""
    out.table(
        ["role", "from", "to", ">weights", ">exact", ">error"],
        [
            (e["role"], e["source"], e["format"], e["weights"], e["exact"], _error(e))
            for e in errors
        ],
    )


def _error(error: Mapping[str, Any]) -> str:
    if error["exact"] == error["weights"]:
        return "exact"
    relative = error["relative_error"]
    if relative is None:
        return "-"
    return f"{relative:.3%}" if relative >= 1e-5 else f"{relative:.1e}"
