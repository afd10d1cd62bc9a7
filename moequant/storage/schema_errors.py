"""Errors of pydantic, about documents that may have been edited, in words."""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import ValidationError

_MAX_KEY = 100


def first_fault(error: ValidationError, at: Iterable[int | str] = ()) -> str:
    """The first of the faults: its place, what must be there, and what was found.

    Args:
        error: of `model_validate`.
        at: the place of what was validated.
    """
    first = error.errors(include_url=False)[0]
    place = field_path((*at, *first["loc"]))
    fault = first["msg"].removeprefix("Value error, ")
    # Our own validators say what they found, and nothing is there to show where a key is missing.
    if first["type"] not in ("value_error", "missing"):
        fault += f", but found {show(first['input'])}"
    return f"{place}: {fault}" if place else fault


def field_path(location: Iterable[int | str]) -> str:
    """The key of an error's location, such as `rules[0].roles[1]`, counted from zero."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{_key(p)}" for p in location)
    return "".join(parts).removeprefix(".")


def _key(key: str) -> str:
    """A key as it is, unless it is long or holds control characters."""
    return key if key.isprintable() and len(key) <= _MAX_KEY else show(key)
