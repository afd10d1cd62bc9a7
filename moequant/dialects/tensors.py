"""Take tensors read from an untrusted checkpoint, with checks of presence, dtype and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dtype_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

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
