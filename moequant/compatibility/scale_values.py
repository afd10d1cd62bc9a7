"""What the values of a scale show: numbers that are not finite, zeros, the largest."""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf, isnan
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.formats import Format

_E8M0_NAN = 255
_E8M0_BIAS = 127
_ROUNDS_TO_INFINITY = (2 - 2**-8) * 2.0**127
"""The smallest number that rounds to infinity in BF16; those of FP32 reach hardly farther."""


@dataclass(frozen=True, kw_only=True)
class ScaleValues:
    """What a scale shows.

    Attributes:
        bad: how many of its numbers are NaN, or else infinite, in words; empty if none is.
        is_zero: whether all of it was read and is zero.
        largest: the largest magnitude; 0 if there are bad numbers.
    """

    bad: str = ""
    is_zero: bool = False
    largest: float = 0.0


def values_of_scale(values: Tensor, *, whole: bool) -> ScaleValues:
    """What a scale shows, of which all was read if `whole`, else the first rows."""
    if not values.numel():
        return ScaleValues()
    if values.dtype in (torch.uint8, torch.float8_e8m0fnu):
        codes = values.view(torch.uint8)
        largest = int(codes.max())
        if largest == _E8M0_NAN:
            return ScaleValues(bad=_count(codes == _E8M0_NAN, "NaN", whole=whole))
        return ScaleValues(largest=2.0 ** (largest - _E8M0_BIAS))
    numbers = values.float()
    # The smallest and the largest say all: both are NaN where any is.
    low, high = (end.item() for end in numbers.aminmax())
    if isnan(low):
        return ScaleValues(bad=_count(numbers.isnan(), "NaN", whole=whole))
    if isinf(low) or isinf(high):
        return ScaleValues(bad=_count(numbers.isinf(), "infinite", whole=whole))
    return ScaleValues(is_zero=whole and low == high == 0, largest=max(abs(low), abs(high)))


def overflow(format: Format, multiplier: float) -> str:
    """Why some weight may be infinite, given the largest product of its scales; else empty."""
    largest = format.element.largest
    if multiplier * largest < _ROUNDS_TO_INFINITY:
        return ""
    return f"a scale of {multiplier:g}, and codes up to {largest:g}"


def _count(wrong: Tensor, word: str, *, whole: bool) -> str:
    if wrong.numel() == 1:
        return word
    read = "" if whole else "the first "
    return f"{int(wrong.sum())} of {read}{wrong.numel()} {word}"
