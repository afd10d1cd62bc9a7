"""The differences between two JSON values."""

from __future__ import annotations

import json
from collections import Counter
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MOST_ITEMS = 3


def differences(found: Any, wanted: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every key, as `place.key`, at which `found` differs from `wanted`, with a message.

    Numbers are compared by value: 1.0 equals 1, true does not equal 1, NaN equals NaN. A list is
    compared as a whole; the message names missing and additional items.
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in {**wanted, **found}:
            where = f"{place}.{key}"
            if key not in found:
                yield where, f"missing, expected {show(wanted[key])}"
            elif key not in wanted:
                yield where, f"{show(found[key])}, but there should be no such key"
            else:
                yield from differences(found[key], wanted[key], where)
    elif isinstance(found, list) and isinstance(wanted, list):
        if not _same_items(found, wanted):
            yield place, _explain(found, wanted)
    # NaN differs from itself.
    elif isinstance(found, bool) != isinstance(wanted, bool) or (
        found != wanted and (found == found or wanted == wanted)
    ):
        yield place, f"{show(found)}, expected {show(wanted)}"


def _same_items(found: list[Any], wanted: list[Any]) -> bool:
    pairs = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and not any(
        next(differences(*pair, ""), None) for pair in pairs
    )


def _explain(found: list[Any], wanted: list[Any]) -> str:
    counts, wanted_counts = Counter(map(_text, found)), Counter(map(_text, wanted))
    lacking, besides = wanted_counts - counts, counts - wanted_counts
    parts = [f"lacks {_list(lacking)}"] if lacking else []
    if besides:
        parts.append(f"holds {_list(besides)} besides")
    return " and ".join(parts) or "its items are in another order than expected"


def _list(items: Iterable[str]) -> str:
    names = list(items)
    more = len(names) - _MOST_ITEMS
    return ", ".join(names[:_MOST_ITEMS]) + (f" and {more} more" if more > 0 else "")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
