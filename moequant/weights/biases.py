"""Biases of experts: refused where they hold NaN or Inf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import NonFiniteError

if TYPE_CHECKING:
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo


def check_bias(source: Checkpoint, info: TensorInfo) -> None:
    """Refuse NaN and Inf in the biases of experts that are converted; they are small, and read.

    Raises:
        NonFiniteError: names the tensor, the index and the value of the first one found.
        CheckpointError: the source cannot be read.
        UnsupportedError: as `Checkpoint.read`.
    """
    values = source.read(info.name)
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        index = bad[0].tolist()
        raise NonFiniteError(
            f"{info.name}: {values[tuple(index)].item()} at index {index}; experts that are "
            "converted have biases without it. Mend the source checkpoint or fetch it again"
        )
