"""Sizes, counts, lists and ranges as text, and the mark of kernels that no GPU has run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NEVER_RUN = "compiled, never run"
"""What is said wherever a backend is named whose kernels no GPU has run."""


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


def first_of(texts: Sequence[str], most: int) -> str:
    """The first texts of many: a, b and 7 more."""
    left = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {left} more" if left > 0 else "")


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as text: 0, 3-5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"
