"""Say in which setting two runs differ."""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def difference(before: object, now: object) -> str:
    """The first setting that differs between two JSON documents, which are not equal, in words."""
    return next(_differences(before, now, ""))


def _differences(before: object, now: object, name: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        # Digests last, because they say least.
        for key in sorted(before.keys() | now.keys(), key=lambda key: ("sha256" in key, key)):
            inner = f"{name}.{key}" if name else key
            yield from _differences(before.get(key), now.get(key), inner)
    elif before != now:
        yield f"{name} was {show(before)} and is {show(now)}"
