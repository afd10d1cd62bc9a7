"""Arguments of layouts, checked."""

from __future__ import annotations

from moequant.arguments import check_count, check_tensor
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
    tensor = check_tensor(name, value, shape)
    if tensor.dim() < 2:
        raise UnsupportedError(f"{name} is {list(tensor.shape)}, but must be {shape}")


def check_extents(least: int = 0, **extents: object) -> None:
    """Check that arguments are whole numbers, none below `least`.

    Raises:
        UnsupportedError: one is not; the message names it.
    """
    for name, value in extents.items():
        check_count(name, value, least)
