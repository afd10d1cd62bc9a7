"""The mark in a model card that moequant wrote, which says whose card it holds.

A published checkpoint has a card of its own in README.md, with the source's card below. So its
README.md is not the source's, which a conversion copied and recorded; the mark tells the two apart.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CARD_FILE = "README.md"

_MARK = re.compile(
    r"^<!-- moequant push wrote what is above; below is the source's card, "
    r"SHA-256 ([0-9a-f]{64}|none) -->$\n?",
    re.MULTILINE,
)
_MAX_BYTES = 10_000_000
"""Larger files are no model cards."""


def mark_of(sha256: str | None) -> str:
    """The line between our card and the source's, of that digest in hex; None if it has none."""
    line = (
        "<!-- moequant push wrote what is above; below is the source's card, "
        f"SHA-256 {sha256 or 'none'} -->"
    )
    assert _MARK.match(line)
    return line


def split_card(text: str) -> tuple[str | None, str] | None:
    """The digest of the source's card and its text, of a card with a mark; None without one."""
    mark = _MARK.search(text)
    if mark is None:
        return None
    return None if mark[1] == "none" else mark[1], text[mark.end() :]


def card_is_of(path: Path, sha256: str) -> bool:
    """Whether `path` is a card that moequant wrote around a source's card of this digest."""
    try:
        if path.name != CARD_FILE or path.stat().st_size > _MAX_BYTES:
            return False
        found = split_card(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    return found is not None and found[0] == sha256
