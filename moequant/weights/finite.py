"""Look for NaN and Inf in tensors that are copied as bytes, part by part."""

from __future__ import annotations

import cmath
from typing import TYPE_CHECKING

import torch

from moequant.storage.headers import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.storage.headers import TensorInfo

_NUMBERS = ("BF16", "F16", "F32", "F64", "C64")
"""Dtypes of numbers that stand for themselves; all others hold codes, scales of codes or ids."""
_TILE = 1 << 16
"""Elements that are looked at one by one together, which takes ten times their memory."""


def find_not_finite(part: Tensor, info: TensorInfo, offset_bytes: int) -> str | None:
    """The first NaN or Inf in a part of a tensor, in words; None if there is none.

    Args:
        part: whole elements of the tensor, uint8 [bytes].
        info: the tensor's header entry.
        offset_bytes: where in the tensor the part begins.
    """
    if info.dtype not in _NUMBERS:
        return None
    values = part.view(DTYPES[info.dtype])
    # A sum takes a 25th of the time of isfinite. It is NaN or Inf if an element is, and else only
    # if finite numbers overflow it.
    if cmath.isfinite(values.sum().item()):
        return None
    position = offset_bytes // values.itemsize
    for tile in torch.split(values, _TILE):
        bad = torch.isfinite(tile).logical_not_().nonzero()
        if len(bad):
            first = int(bad[0])
            place = torch.unravel_index(torch.tensor(position + first), info.shape)
            where = f" at index {[int(i) for i in place]}" if info.shape else ""
            return f"{info.name}: {tile[first].item()}{where}"
        position += len(tile)
    return None
