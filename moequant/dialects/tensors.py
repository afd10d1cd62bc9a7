"""Read single tensors of a checkpoint, strictly: it may be damaged, or written by a stranger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dtype_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_NEXT = "the shard and config.json do not belong together; fetch or convert the checkpoint again"


def read_tensor(tensors: Mapping[str, Tensor], name: str, *dtypes: torch.dtype) -> Tensor:
    """The tensor called `name`, of one of `dtypes`.

    Raises:
        CheckpointError: it is missing or has another dtype.
    """
    if name not in tensors:
        raise CheckpointError(f"{name} is missing, but config.json says its module is quantized")
    tensor = tensors[name]
    if tensor.dtype not in dtypes:
        wanted = " or ".join(map(dtype_text, dtypes))
        raise CheckpointError(f"{name}: dtype {dtype_text(tensor.dtype)}, not {wanted}; {_NEXT}")
    return tensor


def read_matrix(tensors: Mapping[str, Tensor], name: str, *dtypes: torch.dtype) -> Tensor:
    """As `read_tensor`, and two-dimensional."""
    tensor = read_tensor(tensors, name, *dtypes)
    if tensor.ndim != 2:
        raise CheckpointError(f"{name}: shape {list(tensor.shape)}, not two-dimensional; {_NEXT}")
    return tensor


def check_shape(name: str, tensor: Tensor, *shapes: Sequence[int]) -> None:
    """Refuse a tensor that has none of `shapes`.

    Raises:
        CheckpointError: names the tensor, its shape and those wanted.
    """
    if tuple(tensor.shape) not in {tuple(shape) for shape in shapes}:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{name}: shape {list(tensor.shape)}, not {wanted}; {_NEXT}")


def check_columns(name: str, columns: int, group: int) -> None:
    """Refuse codes whose columns do not fill groups.

    Raises:
        CheckpointError: `columns` is not a multiple of `group`.
    """
    if columns % group:
        raise CheckpointError(f"{name}: {columns} columns, not a multiple of {group}; {_NEXT}")


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has data; one on the meta device stands for a header."""
    return tensor.device.type != "meta"


def cast_exactly(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, which must hold every value of it.

    Raises:
        UnsupportedError: a value would be rounded.
    """
    cast = tensor.to(dtype)
    if has_values(tensor) and not torch.equal(cast.float(), tensor.float()):
        raise UnsupportedError(
            f"{name}: {dtype_text(tensor.dtype)} values that {dtype_text(dtype)} cannot hold, "
            "and we keep these scales in that; reading them would change the weight"
        )
    return cast
