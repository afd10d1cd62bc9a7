"""Convert one unit: read, quantize, rename. Shared by the converter and by verification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.formats import get_format

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.checkpoint.source import Checkpoint
    from moequant.conversion.assign import Unit
    from moequant.dialects.base import Dialect


def convert_unit(source: Checkpoint, unit: Unit, dialect: Dialect) -> dict[str, Tensor]:
    """The tensors of a unit as they go to disk, by name.

    Raises:
        NonFiniteError: a weight holds NaN or Inf.
        CheckpointError: the source cannot be read.
    """
    names = [weight.info.name for weight in unit.weights]
    weights = [source.read(name) for name in names]
    quantized = get_format(unit.format).quantize_fused(weights, dict(unit.options), names=names)
    tensors: dict[str, Tensor] = {}
    for weight, q in zip(unit.weights, quantized, strict=True):
        tensors.update(dialect.to_disk(weight.module, q))
    return tensors
