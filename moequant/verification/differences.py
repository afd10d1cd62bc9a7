"""The differences between what is found and what is expected: JSON values, bytes of tensors."""

from __future__ import annotations

import json
from collections import Counter
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moequant.storage.buffers import tensor_bytes
from moequant.storage.headers import DTYPE_BITS, DTYPES, dtype_name
from moequant.units import first_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
        parts.append(f"also has {_list(besides)}")
    return " and ".join(parts) or "its items are in another order than expected"


def _list(items: Iterable[str]) -> str:
    return first_of([*items], _MOST_ITEMS)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def compare_tensors(found: Tensor, wanted: Tensor) -> str | None:
    """How `found` differs from `wanted`, of the same dtype and shape; None if it does not."""
    pair = tensor_bytes(found.contiguous()), tensor_bytes(wanted.contiguous())
    return find_difference([pair], dtype_name(found.dtype), found.shape)


def find_difference(
    pairs: Iterable[tuple[memoryview, memoryview]], dtype: str, shape: Sequence[int]
) -> str | None:
    """The first element that differs and how many do, in words; None if none does.

    Args:
        pairs: pairs of pieces found and wanted, in order, each with whole elements.
        dtype: safetensors name.
        shape: extents.
    """
    # Elements of less than a byte are compared by the byte.
    size = max(DTYPE_BITS[dtype] // 8, 1)
    first, count, position = "", 0, 0
    for found, wanted in pairs:
        # Copies are made because comparing bytes is one memcmp and comparing views is a loop.
        if bytes(found) != bytes(wanted):
            found_bytes, wanted_bytes = _elements(found, size), _elements(wanted, size)
            differing = (found_bytes != wanted_bytes).any(1).nonzero().flatten()
            count += len(differing)
            if not first:
                i = int(differing[0])
                place = _place(position + i, dtype, shape)
                values = _show(found_bytes[i], dtype), _show(wanted_bytes[i], dtype)
                first = f"{place} is {values[0]}, expected {values[1]}"
        position += found.nbytes // size
    return f"{first}; {count} of {position} elements differ" if count else None


def _elements(view: memoryview, size: int) -> Tensor:
    """Bytes as uint8 [elements, size]."""
    return torch.frombuffer(bytearray(view), dtype=torch.uint8).reshape(-1, size)


def _place(index: int, dtype: str, shape: Sequence[int]) -> str:
    if DTYPE_BITS[dtype] < 8:
        return f"byte {index}"
    return f"element {[int(i) for i in torch.unravel_index(torch.tensor(index), tuple(shape))]}"


def _show(element: Tensor, dtype: str) -> str:
    """The value, if torch knows the dtype, and its bits."""
    bits = f"0x{bytes(element.tolist())[::-1].hex()}"
    if dtype not in DTYPES or dtype.startswith("U"):
        return bits
    value = element.view(DTYPES[dtype]).item()
    return f"{value:.6g} ({bits})" if isinstance(value, float) else f"{value} ({bits})"
