"""Upper bounds of the memory of a conversion, computed from headers.

A worker holds the input and results of one unit, while earlier results wait in a buffer for digest
and disk. In addition, the process holds the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from moequant.conversion.batches import BATCH_BYTES
from moequant.conversion.predicted_inputs import PREDICTION_BYTES
from moequant.formats import get_format, tile_bytes
from moequant.formats.squares import TILE_ROWS
from moequant.quantizers.gptq import gptq_bytes
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_weights import PartInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.conversion.units import Unit, Weight
    from moequant.weights.source_weights import WeightInfo


_TENSOR_BYTES = 1200
"""The plan's memory per tensor read or written. Measured for DeepSeek-V3 in BF16 and FP8, with
45,000 to 90,000 tensors read, up to 134,000 written: 930 to 1090; a tenth more for other names."""
WRITE_BUFFER_BYTES = 8 << 20
"""Results per worker, in addition to one batch, that may wait for digest and disk."""
COPY_CHUNK_BYTES = 8 << 20
"""Size of the buffers for copied tensors."""


@dataclass(frozen=True, kw_only=True)
class MemoryBound:
    """Upper bounds of the memory of a plan, in bytes.

    Attributes:
        units: the units to quantize or dequantize.
        tensors: the number of tensors read plus the number of pieces written.
        statistics_bytes: of the layers whose statistics are kept in memory.
    """

    units: tuple[Unit, ...]
    tensors: int
    statistics_bytes: int = 0

    def peak_bytes(self, workers: int) -> int:
        """The peak with `workers`, in addition to the interpreter and torch."""
        unit = max(map(working_bytes, self.units), default=0)
        worker = max(unit + self.batch_bytes, COPY_CHUNK_BYTES)
        shared = self.plan_bytes + self.statistics_bytes
        return workers * worker + self.buffer_bytes(workers) + shared

    @property
    def plan_bytes(self) -> int:
        """The memory of the plan, including headers and index."""
        return _TENSOR_BYTES * self.tensors

    def buffer_bytes(self, workers: int) -> int:
        """Results that may wait for digest and disk while workers continue."""
        return workers * (self.batch_bytes + WRITE_BUFFER_BYTES)

    @cached_property
    def result_bytes(self) -> int:
        """The largest result of a unit."""
        return max((unit.result_bytes for unit in self.units), default=0)

    @cached_property
    def batch_bytes(self) -> int:
        """The largest batch: the result of one unit, or of several small ones."""
        quantizes = any(not unit.is_plain for unit in self.units)
        return max(self.result_bytes, BATCH_BYTES if quantizes else 0)

    @cached_property
    def read_bytes(self) -> int:
        """The largest input of a unit, without copies."""
        return max((unit.tiles[0].source_bytes for unit in self.units), default=0)


def working_bytes(unit: Unit) -> int:
    """What converting a unit, or a tile of it, takes in addition to its batch's results."""
    if len(unit.tiles) > 1:
        return working_bytes(unit.tiles[0])
    if unit.is_plain:
        # In a stack, weights are joined and transposed, with a float32 tile in between.
        return 3 * unit.source_bytes + 2 * unit.result_bytes + _decoding_bytes(unit.weights)
    format = get_format(unit.format)
    stored = {weight.stored_format for weight in unit.weights}
    if unit.lossless and stored == {unit.format} and not format.has_global_scale:
        # Codes and scales are written as they are stored.
        return _reading_bytes(unit.weights, as_stored=True) + unit.result_bytes
    workspace = max(format.workspace_bytes(weight.info.shape) for weight in unit.weights)
    if unit.rounding is not None:
        rounded = max(gptq_bytes(weight.info.shape) for weight in unit.weights)
        # GPTQ decodes what is quantized in the source once more.
        decoded = max(weight.decoded_bytes for weight in unit.weights)
        workspace = max(workspace, decoded + rounded)
    workspace += _prediction_bytes(unit)
    # A second copy of the results exists while tiles are joined and codes are encoded.
    return _reading_bytes(unit.weights) + unit.result_bytes + workspace


def _prediction_bytes(unit: Unit) -> int:
    """Upper bound of what predicting the mean squares of a unit's inputs takes."""
    if unit.predicted is None or not unit.predicted.before:
        return 0
    read = sum(info.size_bytes for info in unit.predicted.before)
    decoded = sum(4 * info.shape[0] * info.shape[1] for info in unit.predicted.before)
    # Read, picked out of a stack and turned, or decoded to float32.
    return 3 * read + decoded + PREDICTION_BYTES


def _decoding_bytes(weights: Sequence[Weight]) -> int:
    """Upper bound of the temporary memory for decoding and comparing weights."""
    return max(tile_bytes(weight.info.shape[1], TILE_ROWS) for weight in weights)


def _stands_alone(info: WeightInfo) -> bool:
    """Whether its tensors hold no other weight."""
    if isinstance(info, EncodedInfo):
        return all(place.expert is None for place in info.places.values())
    return not isinstance(info, PartInfo)


def _reading_bytes(weights: Sequence[Weight], *, as_stored: bool = False) -> int:
    """Upper bound of what weights take while they are read, and decoded unless `as_stored`."""
    source = sum(weight.info.size_bytes for weight in weights)
    # An expert in a stack is read whole, and picked out before it is turned.
    copies = 3 if any(not _stands_alone(weight.info) for weight in weights) else 1
    decoded = sum(weight.decoded_bytes for weight in weights)
    numbers = 0 if as_stored else decoded
    return copies * source + numbers + (_decoding_bytes(weights) if decoded else 0)
