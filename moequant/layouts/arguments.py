"""Arguments of layouts, checked before torch would fail with an error of its own."""

from __future__ import annotations

from operator import index

import torch

from moequant.errors import UnsupportedError


def check_matrices(name: str, value: object, shape: str) -> None:
    """Check that an argument is a dense tensor of two or more dimensions.

    Args:
        name: what messages call it.
        value: the argument.
        shape: what it must be, in words.

    Raises:
        UnsupportedError: it is not.
    """
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"{name} is {type(value).__name__}, but must be a tensor {shape}")
    if value.layout is not torch.strided:
        raise UnsupportedError(f"{name} is {value.layout}, but must be a dense tensor {shape}")
    if value.dim() < 2:
        raise UnsupportedError(f"{name} is {list(value.shape)}, but must be {shape}")


def check_extents(least: int = 0, **extents: object) -> None:
    """Check that arguments are whole numbers, none below `least`.

    Raises:
        UnsupportedError: one is not; the message names it.
    """
    for name, value in extents.items():
        try:
            fits = index(value) >= least  # type: ignore[arg-type]
        except TypeError:
            fits = False
        if not fits:
            raise UnsupportedError(
                f"{name} is {value!r}, but must be a whole number, at least {least}"
            )
