"""Count codes and scales of a converted checkpoint: how many are zero, at the largest value, NaN.

Of a large checkpoint a part is read: of every kind of weights, as many evenly spread ones, and of
each the same rows. No source is needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from moequant.formats import get_format
from moequant.models import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.models import TensorRole
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.encoded import EncodedInfo

MOST_BYTES = 256 << 20
"""What is read at most: half a billion 4-bit codes, in one or two seconds."""
MOST_WEIGHTS = 1500
"""Of how many weights it is read."""
BINS = 20
"""Bins of equal width, of the share of a weight's codes that are zero or at the largest value."""
_MOST_ELEMENTS = 1 << 17
"""Of a weight of which some rows are read."""
_BIAS = 149
"""Of exponents, the lowest of which is that of the smallest float32."""
_NUMBER_BYTES = 8
"""A tensor of at most as many is one number, which goes with all rows."""


@dataclass
class _Counts:
    """Counts of some weights of one format."""

    weights: int = 0
    codes: int = 0
    zero: int = 0
    saturated: int = 0
    nan: int = 0
    weights_by_zero: list[int] = field(default_factory=lambda: [0] * BINS)
    weights_by_saturated: list[int] = field(default_factory=lambda: [0] * BINS)
    scales: int = 0
    zero_scales: int = 0
    nan_scales: int = 0
    scales_by_exponent: Counter[int] = field(default_factory=Counter)


def count_codes(
    checkpoint: Checkpoint,
    weights: Iterable[EncodedInfo],
    roles: Mapping[str, TensorRole],
    *,
    workers: int,
) -> list[dict[str, Any]]:
    """Count codes and scales, by format.

    Args:
        checkpoint: a converted checkpoint.
        weights: its quantized weights.
        roles: the role of each, by name.
        workers: number of weights read in parallel.

    Returns:
        For each format: `weights` in all, and how many `counted`; `codes` counted, of which `zero`,
        `saturated` (at the lowest or largest number of the element) and `nan`; the number of
        weights in each of BINS bins of their share of zero, and of saturated codes; `scales`
        counted, of which `zero_scales` and `nan_scales` (also infinite); `scales_by_exponent`, the
        number of scales s with floor(log2 |s|) = e as pairs [e, number], where s is the scale
        times the global one.

    Raises:
        CheckpointError: a file cannot be read, or codes and scales do not fit each other.
    """
    by_kind: dict[tuple[str, str, str | None], list[EncodedInfo]] = defaultdict(list)
    for info in weights:
        role = roles[info.name]
        by_kind[info.format, role.role, role.projection].append(info)
    found: dict[str, _Counts] = {}
    totals: Counter[str] = Counter()
    with ThreadPoolExecutor(workers, "moequant-codes") as pool:
        for (format, _, _), infos in by_kind.items():
            counts = found.setdefault(format, _Counts())
            totals[format] += len(infos)
            parts = _sample(infos, len(by_kind))
            for part in pool.map(lambda info: _count(info.read(checkpoint)), parts):
                _add(counts, part)
    return [_describe(format, counts, totals[format]) for format, counts in found.items()]


def _sample(infos: Sequence[EncodedInfo], kinds: int) -> list[EncodedInfo]:
    """All of the weights of one of several kinds, or evenly spread ones, and some rows of each."""
    most_bytes, most_weights = MOST_BYTES // kinds, max(1, MOST_WEIGHTS // kinds)
    if len(infos) > most_weights:
        infos = [infos[i * len(infos) // most_weights] for i in range(most_weights)]
    if sum(info.size_bytes for info in infos) <= most_bytes:
        return list(infos)
    parts = [_some_rows(info) for info in infos]
    size_bytes = sum(info.size_bytes for info in parts)
    number = max(1, min(len(parts), len(parts) * most_bytes // size_bytes))
    return [parts[i * len(parts) // number] for i in range(number)]


def _some_rows(info: EncodedInfo) -> EncodedInfo:
    """Rows in the middle of a weight; all of it if its tensors cannot be read by rows."""
    N, K = info.shape
    block = get_format(info.format).block[0]
    blocks, wanted = N // block, -(-N * K // _MOST_ELEMENTS)
    count = next((n for n in range(wanted, blocks + 1) if blocks % n == 0), max(blocks, 1))
    alone = all(place == Place(tensor=place.tensor) for place in info.places.values())
    rows = {part.name: part.shape[0] for part in info.parts if part.size_bytes > _NUMBER_BYTES}
    if count == 1 or N % block or not alone or not {*rows.values()} <= {N, blocks}:
        return info
    places = {
        name: replace(place, expert=count // 2, height=rows[place.tensor] // count)
        if place.tensor in rows
        else place
        for name, place in info.places.items()
    }
    size_bytes = info.size_bytes // count
    return replace(info, shape=(N // count, K), size_bytes=size_bytes, places=places)


def _count(q: QuantizedWeight) -> _Counts:
    zero, saturated, nan, found = *_kinds(q.format), _histogram(q)
    codes, of_zero, of_saturated = (int(found[kind].sum()) for kind in (..., zero, saturated))
    counts = _Counts(
        weights=1, codes=codes, zero=of_zero, saturated=of_saturated, nan=int(found[nan].sum())
    )
    counts.weights_by_zero[_bin(of_zero, codes)] += 1
    counts.weights_by_saturated[_bin(of_saturated, codes)] += 1
    scales = q.scale.float().flatten()
    if q.global_scale is not None:
        scales = scales * q.global_scale.float()
    finite = scales[scales.isfinite()]
    exponents = torch.frexp(finite[finite != 0]).exponent - 1
    counts.scales = scales.numel()
    counts.nan_scales = scales.numel() - finite.numel()
    counts.zero_scales = finite.numel() - exponents.numel()
    occurring = torch.bincount(exponents + _BIAS)
    counts.scales_by_exponent.update(
        {int(place) - _BIAS: int(occurring[place]) for place in occurring.nonzero().flatten()}
    )
    return counts


def _histogram(q: QuantizedWeight) -> Tensor:
    """How often each code occurs: int64 [16] or [256]."""
    found = torch.bincount(q.qdata.contiguous().view(torch.uint8).flatten(), minlength=256)
    if get_format(q.format).codes_per_byte == 1:
        return found
    # A byte holds two codes; row h of the square has the bytes with h in the high nibble.
    square = found.reshape(16, 16)
    return square.sum(0) + square.sum(1)


@cache
def _kinds(format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Which codes are zero, at the end of the element's range, and NaN: bool [16] or [256]."""
    element = get_format(format).element
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    numbers = element.decode(codes if element.bits == 4 else codes.view(element.dtype))
    ends = (numbers == element.lowest) | (numbers == element.largest)
    return numbers == 0, ends, numbers.isnan()


def _bin(part: int, whole: int) -> int:
    return min(BINS - 1, part * BINS // max(whole, 1))


def _add(counts: _Counts, part: _Counts) -> None:
    for name, value in vars(part).items():
        own = getattr(counts, name)
        if isinstance(value, int):
            setattr(counts, name, own + value)
        elif isinstance(value, Counter):
            own.update(value)
        else:
            setattr(counts, name, [a + b for a, b in zip(own, value, strict=True)])


def _describe(format: str, counts: _Counts, weights: int) -> dict[str, Any]:
    plain = {**vars(counts), "weights": weights, "counted": counts.weights}
    exponents = sorted(counts.scales_by_exponent.items())
    return {"format": format, **plain, "scales_by_exponent": [list(pair) for pair in exponents]}
