"""Memory of tensors: their bytes, without a copy and without numpy, and pages to use again."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_ALIGNMENT = 64
"""Of tensors in an arena: a line of the cache, and the widest vector."""
PAGE_BYTES = 4096
"""Of memory, and what writes past the page cache must begin and end with; disks ask for less."""
_MOST_VIEWS = 64
"""Of an arena, that it keeps: to make one takes three torch operations."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's memory, one item a byte; keeps the tensor alive.

    Goes through the address because torch has no buffer protocol, and numpy's knows
    neither bfloat16 nor float8.
    """
    return joined_bytes([tensor])


def joined_bytes(tensors: Sequence[Tensor]) -> memoryview:
    """`tensor_bytes` of tensors of which each begins in memory where the one before it ends."""
    for tensor in tensors:
        assert tensor.is_cpu, tensor.device
        assert tensor.is_contiguous(), tensor.stride()
        assert not tensor.is_conj(), "the memory is not the value"
        assert not tensor.is_neg(), "the memory is not the value"
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    if size_bytes == 0:
        return memoryview(bytearray())
    array = _array_type(size_bytes).from_address(tensors[0].data_ptr())
    array._tensors = tensors  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


@lru_cache(maxsize=64)
def _array_type(size_bytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Kept, because ctypes forgets it, and to make one costs half of `joined_bytes`."""
    return ctypes.c_ubyte * size_bytes


def _allocate(size_bytes: int) -> Tensor:
    # The device is named because `torch.set_default_device` may have set another.
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


class Arena:
    """Memory for tensors that come and go together; for one thread.

    Fresh pages cost a core more than anything it does to them: it reads a cached file at 2 GB/s
    into new memory and at 20 GB/s into memory it has had before.

    Args:
        allocate: gives so many bytes or a few more, uint8; CPU memory by default.
        size_bytes: of tensors that are expected to lie in it at once.
    """

    def __init__(self, allocate: Callable[[int], Tensor] = _allocate, size_bytes: int = 0) -> None:
        self._allocate = allocate
        self._used = 0
        self._keep(size_bytes + PAGE_BYTES if size_bytes else 0)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of any values, good until `clear`."""
        # One unit is like the next, and its tensors lie where those of the last lay.
        kept = self._views.get((self._used, dtype, *shape))
        tensor, self._used = kept or self._view(self._used, dtype, tuple(shape))
        return tensor

    @property
    def size_bytes(self) -> int:
        """What it will keep after `clear`."""
        fits = self._used <= self._kept_bytes
        return self._kept_bytes if fits else self._used + PAGE_BYTES

    def clear(self) -> None:
        """Let go of all tensors, which must no longer be used, and keep their memory."""
        size_bytes = self.size_bytes
        self._used = 0
        self.reserve(size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """Before the first tensor: have room for so many bytes, each tensor's rounded up."""
        assert self._used == 0, self._used
        if size_bytes > self._kept_bytes:
            # The old goes before the new comes.
            self._keep(0)
            self._keep(size_bytes)

    def begin_like(self, position: int) -> None:
        """Let the first tensor after `clear` lie in its page as `position` of a file does.

        Not where that would leave it, or one behind it, unaligned.
        """
        assert self._used == 0, self._used
        if position % _ALIGNMENT == 0:
            self._used = (position - self._address) % PAGE_BYTES

    def _keep(self, size_bytes: int) -> None:
        self._views: dict[tuple[object, ...], tuple[Tensor, int]] = {}
        self._memory = self._allocate(size_bytes)
        self._kept_bytes = len(self._memory)
        self._address = self._memory.data_ptr()

    def _view(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        """A tensor that begins at `start`, and where the next one does."""
        size_bytes = math.prod(shape) * dtype.itemsize
        stop = start + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        if stop > self._kept_bytes:
            # Alone this once; `clear` makes room for the next of its kind.
            return self._allocate(size_bytes)[:size_bytes].view(dtype).view(shape), stop
        view = self._memory[start : start + size_bytes].view(dtype).view(shape), stop
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        self._views[start, dtype, *shape] = view
        return view
