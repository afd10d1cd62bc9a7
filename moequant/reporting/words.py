"""Numbers and times as a person reads them."""

from __future__ import annotations

NONE = "-"
"""Shown for what is unknown, or not a finite number."""


def percent(value: float | None) -> str:
    """A share or relative error with three significant digits: 9.52 %."""
    if value is None:
        return NONE
    if value in (0, 1):
        return f"{100 * value:.0f} %"
    if abs(value) < 5e-6:
        return f"{100 * value:.1e} %"
    digits = 3 if abs(value) < 0.01 else 2 if abs(value) < 0.1 else 1
    return f"{100 * value:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A number with some significant digits."""
    return NONE if value is None else f"{value:.{digits}g}"


def with_error(value: float | None, error: float | None) -> str:
    """A number and its standard error."""
    return number(value) if error is None else f"{number(value)} ± {number(error, 2)}"


def seconds(value: float) -> str:
    """A duration: 41 s, 12 min, 3.1 h."""
    if value < 120:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def listed(words: list[str]) -> str:
    """Words as a sentence has them: a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
