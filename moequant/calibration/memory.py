"""An upper bound of the memory of a calibration, before it starts.

One layer is in memory with the batch that runs through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.streaming.memory import batch_bytes, embedding_bytes, kernel_bytes

if TYPE_CHECKING:
    from moequant.calibration.data import CalibrationData
    from moequant.integrations.layerwise import LayerwiseModel
    from moequant.statistics import StatisticsRecord

HESSIAN_ROWS_BYTES = 512 << 20
"""Rows that are kept before second moments are added to the file."""


@dataclass(frozen=True, kw_only=True)
class CalibrationMemory:
    """Upper bounds in bytes, in addition to the interpreter and libraries.

    Attributes:
        rest: weights outside of layers and embedding, which stay.
        embedding: while the embedding is loaded.
        layer: weights of the largest layer, with what loading it takes.
        batch: what a batch takes while it runs.
        sums: of one layer.
        hessian: rows and matrices of second moments.
        kernels: that a library compiles and keeps.
    """

    rest: int
    embedding: int
    layer: int
    batch: int
    sums: int
    hessian: int
    kernels: int

    @property
    def peak_bytes(self) -> int:
        """The peak."""
        return (
            max(self.embedding, self.layer + self.batch + self.sums + self.hessian) + self.kernels
        )


def memory_of(
    model: LayerwiseModel, data: CalibrationData, record: StatisticsRecord, layers: range
) -> CalibrationMemory:
    """The memory of running `layers` of a model over the data."""
    H, I = record.hidden, record.intermediate
    return CalibrationMemory(
        rest=model.rest_bytes,
        embedding=embedding_bytes(model, data.batches),
        layer=max(model.loading_bytes(index) for index in layers),
        batch=batch_bytes(model, data.batches, layers),
        sums=record.experts * (H + I) * (8 + 8 + 4),
        hessian=(HESSIAN_ROWS_BYTES + 4 * H * H * 8) if record.hessian else 0,
        kernels=kernel_bytes(model),
    )
