"""Read untrusted JSON of a checkpoint: headers, config.json, index, records.

Decisions, each with the failure it prevents:

* A duplicate key is an error, because two readers could use different values.
* Size, and brackets per byte, are limited before parsing. A file of brackets takes 25 times its
  size in memory; the worst accepted file takes 12 times, and a valid header 9 times.
* Nesting is limited. Otherwise walking over a document, or writing it again, could exhaust the
  stack after hours of work.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from reprlib import Repr
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError
from moequant.units import first_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from moequant.storage.reader import FixedFile

MAX_BYTES = 100_000_000
"""Largest header that safetensors accepts; real indices and configs are far smaller."""

_NAMES = Repr()
_NAMES.maxstring = 300
show_name = _NAMES.repr
"""A name from an untrusted file, for messages: whole, as names of tensors are, but not endless."""

REMEDY = "correct it or fetch it again"
_MAX_DEPTH = 100
_PLACES_SHOWN, _MAX_PLACE = 3, 100
_LITERALS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
# A tensor takes 48 bytes of header and three brackets; small files are not limited.
_BYTES_A_BRACKET = 8
_SMALL_BYTES = 1_000_000


def read_document(file: FixedFile) -> dict[str, Any]:
    """Read a JSON object such as config.json.

    Raises:
        CheckpointError: as `parse_object`; or the file cannot be read, is too large, or is nested
            too deeply.
    """
    if file.size_bytes > MAX_BYTES:
        raise CheckpointError(
            f"{file.path}: {file.size_bytes} bytes, but at most {MAX_BYTES} are allowed; {REMEDY}"
        )
    value = parse_object(file.read(0, file.size_bytes), file.path)
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return value
    raise CheckpointError(
        f"{file.path}: nested deeper than the {_MAX_DEPTH} levels that are allowed; {REMEDY}"
    )


def object_at(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The JSON object at a key of a document that may have been edited; empty for all else."""
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def parse_object(text: bytes | bytearray, path: Path) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys; `path` is for error messages.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, a duplicate key, or too many brackets.
    """
    brackets = text.count(b"[") + text.count(b"{")
    if len(text) > _SMALL_BYTES and brackets * _BYTES_A_BRACKET > len(text):
        raise CheckpointError(f"{path}: {brackets} brackets in {len(text)} bytes; {REMEDY}")
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    # A few thousand levels of nesting exhaust the parser's stack.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; {REMEDY}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {show(value)}, but must be a JSON object; {REMEDY}")
    return value


def non_finite_numbers(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Place and value of each NaN or infinity of a document, which Python reads but JSON lacks.

    A number such as 1e999, which is infinite as a float, counts, too. A place is written as in
    `rope_scaling.factors[2]`.
    """
    left: list[tuple[str, Any]] = [("", document)]
    while left:
        place, value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield place, value
        elif isinstance(value, dict):
            inner = [(f"{place}.{key}" if place else key, part) for key, part in value.items()]
            left += reversed(inner)
        elif isinstance(value, list):
            left += reversed([(f"{place}[{i}]", part) for i, part in enumerate(value)])


def non_finite_text(document: Mapping[str, Any]) -> str:
    """`non_finite_numbers` in words, and what becomes of the file; empty if there is none.

    Such as "rms_norm_eps is NaN, which JSON does not have: Python reads it, but ...".
    """
    found = non_finite_numbers(document)
    said = [f"{place:.{_MAX_PLACE}} is {_LITERALS[str(value)]}" for place, value in found]
    if not said:
        return ""
    return (
        f"{first_of(said, _PLACES_SHOWN)}, which JSON does not have: Python reads it, but other "
        "readers refuse the file"
    )


def _children(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {show_name(twice)} occurs twice")
    return fields
