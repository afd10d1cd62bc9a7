"""Tensors on their way from the files to vLLM's loader, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.dialects.tensors import cast_exactly
from moequant.errors import CheckpointError
from moequant.formats import TensorSpec, dtype_text
from moequant.formats.base import SOURCE_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

_BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
"""Dtypes that writers give the same bytes."""


def as_stored(name: str, tensor: Tensor, spec: TensorSpec) -> Tensor:
    """A tensor of a checkpoint in the dtype and shape of its parameter; no value changes.

    Args:
        name: for errors.
        tensor: as it is in the file; dimensions of size 1 may differ.
        spec: what the parameter holds of a whole weight.

    Raises:
        CheckpointError: another shape or dtype.
        UnsupportedError: a scale that its dtype here does not hold.
    """
    if _sizes(tensor.shape) != _sizes(spec.shape):
        raise wrong_shape(name, tensor, spec.shape)
    return as_dtype(name, tensor, spec.dtype).reshape(spec.shape)


def as_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `as_stored`, of any shape: the model may have cut this rank's part already."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype in _BYTES and dtype in _BYTES:
        return tensor.view(dtype)
    if tensor.dtype == torch.float8_e8m0fnu and dtype == torch.float32:
        return tensor.float()
    if tensor.dtype in SOURCE_DTYPES and dtype in SOURCE_DTYPES:
        return cast_exactly(name, tensor, dtype)
    raise CheckpointError(
        f"{name}: dtype {dtype_text(tensor.dtype)}, but by config.json it must be "
        f"{dtype_text(dtype)}; fetch or convert the checkpoint again"
    )


def wrong_shape(name: str, tensor: Tensor, wanted: torch.Size | tuple[int, ...]) -> CheckpointError:
    """The error of a tensor whose shape is not the one that config.json says."""
    return CheckpointError(
        f"{name}: shape {list(tensor.shape)}, but by config.json it must be {list(wanted)}; fetch "
        "or convert the checkpoint again"
    )


def _sizes(shape: torch.Size | tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]
