"""The bytes of a tensor, without a copy and without numpy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's memory, one item a byte; keeps the tensor alive.

    Goes through the address because torch has no buffer protocol and numpy, which would lend its
    own, knows neither bfloat16 nor float8.
    """
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), tensor.stride()
    assert not tensor.is_conj(), "the memory is not the value"
    assert not tensor.is_neg(), "the memory is not the value"
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array._tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
