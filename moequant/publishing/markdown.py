"""Pieces of Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; a column whose name begins with `>` is right-aligned."""
    names = [column.removeprefix(">") for column in columns]
    rules = ["---:" if column.startswith(">") else "---" for column in columns]
    lines = [names, rules, *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code_block(language: str, text: str) -> str:
    """Code in a fence that is longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def link(text: str, path: str) -> str:
    """A link to a file of the repository, whose name may hold anything."""
    escaped = re.sub(r"([\\\[\]])", r"\\\1", text)
    return f"[{escaped}]({quote(path)})"


def plain(text: str) -> str:
    """A text in one line, without what Markdown or HTML would take for markup."""
    return re.sub(r"([\\`*_\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def _cell(cell: object) -> str:
    return " ".join(str(cell).split()).replace("|", "\\|")
