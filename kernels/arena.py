"""Tensors from one buffer, laid out the same way every time, so that its size is known before."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT_BYTES = 256


class WorkspaceArena:
    """Hands out parts of `buffer`, one behind the other.

    Args:
        buffer: uint8, large enough for all that is asked for; or None, and what is handed out has
            no memory: to find out how much that is.
    """

    def __init__(self, buffer: Tensor | None = None) -> None:
        # Views of `buffer` itself would keep that object, and `KeptPlans` asks whether it is gone.
        self._buffer = None if buffer is None else buffer.data
        self.size_bytes = 0
        """Bytes handed out so far."""

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, not initialized."""
        start = -(-self.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.size_bytes = start + math.prod(shape) * dtype.itemsize
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._buffer[start : self.size_bytes].view(dtype).view(shape)
