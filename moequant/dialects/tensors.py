"""Take tensors read from an untrusted checkpoint, with checks of presence, dtype and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dtype_text
from moequant.formats.base import WHOLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale; WHOLE for all of them."""

_NEXT = "the tensors and config.json do not belong together; fetch or convert the checkpoint again"


def read_tensor(tensors: Mapping[str, Tensor], name: str, *dtypes: torch.dtype) -> Tensor:
    """The tensor called `name`, which must have one of `dtypes`.

    Raises:
        CheckpointError: it is missing or has another dtype.
    """
    if name not in tensors:
        raise CheckpointError(
            f"{name} is missing, but config.json says that its module is quantized; {_NEXT}"
        )
    tensor = tensors[name]
    if tensor.dtype not in dtypes:
        wanted = " or ".join(map(dtype_text, dtypes))
        raise CheckpointError(f"{name}: dtype {dtype_text(tensor.dtype)}, not {wanted}; {_NEXT}")
    return tensor


def read_matrix(tensors: Mapping[str, Tensor], name: str, *dtypes: torch.dtype) -> Tensor:
    """As `read_tensor`, for a tensor that must be two-dimensional."""
    tensor = read_tensor(tensors, name, *dtypes)
    if tensor.ndim != 2:
        raise CheckpointError(f"{name}: shape {list(tensor.shape)}, not two-dimensional; {_NEXT}")
    return tensor


def check_shape(name: str, tensor: Tensor, *shapes: Sequence[int]) -> None:
    """Check that a tensor has one of `shapes`.

    Raises:
        CheckpointError: it has another shape.
    """
    if tuple(tensor.shape) not in {tuple(shape) for shape in shapes}:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{name}: shape {list(tensor.shape)}, not {wanted}; {_NEXT}")


def check_columns(name: str, columns: int, group: int) -> None:
    """Check that the columns of codes fill groups.

    Raises:
        CheckpointError: `columns` is not a multiple of `group`.
    """
    if columns % group:
        raise CheckpointError(f"{name}: {columns} columns, not a multiple of {group}; {_NEXT}")


def check_stated(name: str, scale: Tensor, shape: Sequence[int], block: Block) -> None:
    """Check that a scale has the shape that config.json makes it.

    Args:
        name: of the scale.
        scale: as found on disk.
        shape: N and K of its weight.
        block: rows and columns that share a scale, by config.json: one row and a group of
            columns, or all columns of one or all rows.

    Raises:
        CheckpointError: it has another shape, or the blocks do not fill the columns.
    """
    (N, K), (rows, columns) = shape, block
    says = f"config.json says {_text(block)}"
    if columns != WHOLE and K % columns:
        raise CheckpointError(
            f"{name}: {says}, which do not divide the {K} columns of its weight; {_NEXT}"
        )
    wanted = [[-(-N // rows), -(-K // columns)]]
    if block == (WHOLE, WHOLE):
        wanted = [[1], []]
    elif columns == WHOLE:
        wanted.append([N])
    if list(scale.shape) not in wanted:
        shapes = " or ".join(map(str, wanted))
        raise CheckpointError(
            f"{name}: shape {list(scale.shape)}, but {says}, so it must be {shapes} for a weight "
            f"of shape [{N}, {K}]; {_NEXT}"
        )


def _text(block: Block) -> str:
    """What shares a scale, for error messages."""
    rows, columns = block
    if columns != WHOLE:
        return f"a scale for groups of {columns} columns"
    return "one scale for the whole weight" if rows == WHOLE else "a scale for each row"


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has data; a tensor on the meta device represents a header."""
    return tensor.device.type != "meta"


def cast_exactly(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, which must represent every value exactly.

    Raises:
        UnsupportedError: a value would be rounded.
    """
    cast = tensor.to(dtype)
    if dtype == torch.float32 or tensor.dtype == dtype or not has_values(tensor):
        return cast
    if not torch.equal(cast.float(), tensor.float()):
        raise UnsupportedError(
            f"{name}: {dtype_text(tensor.dtype)} values that {dtype_text(dtype)}, the format's "
            "scale dtype, cannot represent; convert from the unquantized checkpoint"
        )
    return cast
