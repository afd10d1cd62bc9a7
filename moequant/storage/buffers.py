"""Tensor memory: views of its bytes without numpy, and arenas that reuse pages."""

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
"""Alignment of tensors in an arena: a cache line, and the widest vector."""
PAGE_BYTES = 4096
"""Size of a memory page, and alignment of direct writes; disks require less."""
_MAX_VIEWS = 64
"""Tensors that an arena caches, because creating one takes three torch operations."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's memory, one item a byte; keeps the tensor alive.

    Goes through the address because torch has no buffer protocol, and numpy's knows
    neither bfloat16 nor float8.
    """
    return joined_bytes([tensor])


def joined_bytes(tensors: Sequence[Tensor]) -> memoryview:
    """As `tensor_bytes`, for tensors that are adjacent in memory, in order."""
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
    """Cached, because creating the type takes half the time of `joined_bytes`."""
    return ctypes.c_ubyte * size_bytes


def _allocate(size_bytes: int) -> Tensor:
    # The device is named because `torch.set_default_device` may have set another.
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


class Arena:
    """Reused memory for tensors that are freed together; not thread-safe.

    Page faults of fresh memory cost more than the work on it: a core reads a cached file at 2 GB/s
    into new memory and at 20 GB/s into reused memory.

    Args:
        allocate: allocates at least this many bytes, uint8; CPU memory by default.
        size_bytes: expected total size of the tensors.
    """

    def __init__(self, allocate: Callable[[int], Tensor] = _allocate, size_bytes: int = 0) -> None:
        self._allocate = allocate
        self._used = 0
        self._keep(size_bytes + PAGE_BYTES if size_bytes else 0)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """An uninitialized contiguous tensor, valid until `clear`."""
        # Units are alike, so the tensors of one often have the places of the last one's.
        kept = self._views.get((self._used, dtype, *shape))
        tensor, self._used = kept or self._view(self._used, dtype, tuple(shape))
        return tensor

    @property
    def size_bytes(self) -> int:
        """The size of its memory after `clear`."""
        fits = self._used <= self._kept_bytes
        return self._kept_bytes if fits else self._used + PAGE_BYTES

    def clear(self) -> None:
        """Free all tensors, which must no longer be used, and keep the memory for reuse."""
        size_bytes = self.size_bytes
        self._used = 0
        if size_bytes > self._kept_bytes:
            # Free the old memory before allocating the new.
            self._keep(0)
            self._keep(size_bytes)

    def begin_like(self, position: int) -> None:
        """Give the first tensor after `clear` the same offset in its page as a file position.

        Does nothing if the tensors would then be unaligned.
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
        """A tensor that begins at `start`, and the start of the next one."""
        size_bytes = math.prod(shape) * dtype.itemsize
        stop = start + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        if stop > self._kept_bytes:
            # Allocated separately this time; `clear` grows the memory for the next time.
            return self._allocate(size_bytes)[:size_bytes].view(dtype).view(shape), stop
        view = self._memory[start : start + size_bytes].view(dtype).view(shape), stop
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        self._views[start, dtype, *shape] = view
        return view
