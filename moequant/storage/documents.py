"""JSON of a checkpoint, read as if the file lied: headers, config.json, index, records.

Decision / failure it prevents:

* a key that occurs twice is an error / two readers take two different values;
* size, and brackets for each byte, are bounded before anything is parsed / a file of brackets takes
  25 times its size in memory, where the worst let through takes 12 and a valid header 9 times;
* documents are not nested deeply / a walk over one, or writing it again, exhausts the stack after
  hours of work.
"""

from __future__ import annotations

import json
from collections import Counter
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from moequant.storage.reader import FixedFile

MAX_BYTES = 100_000_000
"""What safetensors accepts as a header; no real index or config comes near."""

_REMEDY = "mend it or fetch it again"
_MAX_DEPTH = 100
# A tensor takes 48 bytes of header and three brackets; small files may be as they like.
_BYTES_A_BRACKET = 8
_SMALL_BYTES = 1_000_000


def read_document(file: FixedFile) -> dict[str, Any]:
    """Read a JSON object that will be walked and written again, such as config.json.

    Raises:
        CheckpointError: as `parse_object`, the file cannot be read, or it is larger or nested
            deeper than any real one.
    """
    if file.size_bytes > MAX_BYTES:
        raise CheckpointError(
            f"{file.path}: {file.size_bytes} bytes, but at most {MAX_BYTES} are read; {_REMEDY}"
        )
    value = parse_object(file.read(0, file.size_bytes), file.path)
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return value
    raise CheckpointError(
        f"{file.path}: nested deeper than {_MAX_DEPTH} levels, which no real one is; {_REMEDY}"
    )


def parse_object(text: bytes | bytearray, path: Path) -> dict[str, Any]:
    """Parse a JSON object in which no key repeats; `path` is what errors name.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, a key occurs twice, or there are more
            brackets than in any real one.
    """
    brackets = text.count(b"[") + text.count(b"{")
    if len(text) > _SMALL_BYTES and brackets * _BYTES_A_BRACKET > len(text):
        raise CheckpointError(f"{path}: {brackets} brackets in {len(text)} bytes; {_REMEDY}")
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    # Nesting of a few thousand levels exhausts the parser's stack.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}; {_REMEDY}") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds {show(value)}, but a JSON object is wanted; {_REMEDY}"
        )
    return value


def _children(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {show(twice)} occurs twice")
    return fields
