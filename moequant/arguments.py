"""Arguments that callers give, checked before torch would fail with an error of its own."""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from moequant.errors import UnsupportedError


def check_tensor(name: str, value: object, shape: str = "") -> torch.Tensor:
    """`value`, which must be a dense tensor.

    Args:
        name: what messages call it.
        value: the argument.
        shape: what it must be, in words; empty if messages need not say.

    Raises:
        UnsupportedError: it is not.
    """
    wanted = f"tensor {shape}".rstrip()
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"{name} is {type(value).__name__}, but must be a {wanted}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise UnsupportedError(f"{name} is {kind}, but must be a dense {wanted}")
    return value


def check_argument(
    name: str,
    value: object,
    dtypes: tuple[torch.dtype, ...],
    shape: str,
    device: torch.device | None = None,
) -> torch.Tensor:
    """`value`, which must be a dense tensor of a dtype, a number of dimensions and a device.

    Args:
        name: what messages call it.
        value: the argument.
        dtypes: those it may have.
        shape: names of its dimensions, such as "[M, T]".
        device: that of the experts; by default any.

    Raises:
        UnsupportedError: it is not.
    """
    tensor = check_tensor(name, value)
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(dtype) for dtype in dtypes)
        raise UnsupportedError(f"{name} is {tensor.dtype}, but must be one of: {expected}")
    if tensor.dim() != len(shape.split(",")):
        raise UnsupportedError(f"{name} is {list(tensor.shape)}, but must be {shape}")
    if device is not None and tensor.device != device:
        raise UnsupportedError(
            f"{name} is on {tensor.device}, but the experts are on {device}; move it there"
        )
    return tensor


def check_flag(name: str, value: object) -> bool:
    """`value`, which must be a truth value.

    Raises:
        UnsupportedError: it is not.
    """
    if value is not True and value is not False:
        raise UnsupportedError(f"{name} is {value!r}, but must be True or False")
    return value


def check_count(name: str, value: object, least: int = 0) -> int:
    """A number of tokens, rows or the like that a caller gives.

    Raises:
        UnsupportedError: it is no whole number, or less than `least`.
    """
    try:
        count = whole_number(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise UnsupportedError(f"{name} is {value!r}, but must be a whole number, at least {least}")
    return count


def whole_number(value: Any) -> int:
    """An integer of any library; raises TypeError for what is none, such as a truth value."""
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        raise TypeError(f"{value!r} is a truth value")
    return index(value)
