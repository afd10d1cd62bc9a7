"""Say in which settings two runs differ."""

from __future__ import annotations

from itertools import zip_longest
from reprlib import repr as show
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_NAME = 100
"""Names are keys of a file that may have been edited."""


def difference(before: object, now: object) -> str:
    """The first setting that differs between two JSON documents, which are not equal, in words."""
    return next(setting_differences(before, now))


def setting_differences(before: object, now: object, name: str = "") -> Iterator[str]:
    """Every setting that differs between two JSON documents, with both values, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        # Digests last, because they say least.
        for key in sorted(before.keys() | now.keys(), key=lambda key: ("sha256" in key, key)):
            inner = f"{name}.{key}" if name else key
            yield from setting_differences(before.get(key), now.get(key), inner)
    elif isinstance(before, list) and isinstance(now, list):
        for number, pair in enumerate(zip_longest(before, now)):
            yield from setting_differences(*pair, f"{name}[{number}]")
    elif before != now:
        yield f"{name:.{_MAX_NAME}} was {_show(before)} and is {_show(now)}"


def _show(value: object) -> str:
    return "not given" if value is None else show(value)
