"""Tables of text that fit a terminal without splitting a name, so that names can be copied."""

from __future__ import annotations

from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_GAP = "   "


def table_lines(
    columns: Sequence[str], rows: Iterable[Sequence[str]], width: int | None
) -> Iterator[str]:
    """The lines of a table: a line a row, or folded between words to lines of at most `width`.

    A table whose longest words do not fit beside each other becomes a block of lines for each row,
    one for each cell.

    Args:
        columns: headings; those of right-aligned columns begin with `>`, and only their heading
            folds.
        rows: text of each cell, in one line.
        width: columns of the terminal; None for no limit.
    """
    right = [column.startswith(">") for column in columns]
    head = [column.removeprefix(">") for column in columns]
    body = [list(row) for row in rows]
    natural = [max(map(len, cells)) for cells in zip(head, *body, strict=True)]
    least = [
        max(_longest_word(title), *(len(c) if aligned else _longest_word(c) for c in cells), 0)
        for aligned, title, *cells in zip(right, head, *body, strict=True)
    ]
    if width is not None and _total(least) > width:
        yield from _blocks(head, body)
        return
    widths = natural if width is None else _narrowed(natural, least, width)
    for row in (head, *body):
        folded = [_folded(cell, w) for cell, w in zip(row, widths, strict=True)]
        for line in zip_longest(*folded, fillvalue=""):
            cells = zip(line, widths, right, strict=True)
            aligned = (t.rjust(w) if to_right else t.ljust(w) for t, w, to_right in cells)
            yield _GAP.join(aligned).rstrip()


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _narrowed(natural: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Widths that fit `width`: the widest column that can be folded gives way first."""
    widths = list(natural)
    while _total(widths) > width:
        foldable = [i for i, w in enumerate(widths) if w > least[i]]
        widths[max(foldable, key=lambda i: widths[i])] -= 1
    return widths


def _folded(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    return wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def _blocks(head: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    wide = max(map(len, head))
    for number, row in enumerate(body):
        if number:
            yield ""
        for title, cell in zip(head, row, strict=True):
            yield f"{title:<{wide}}{_GAP}{cell}".rstrip()
