"""How much memory a conversion takes, from what headers say: bounds that hold, to be planned with.

A worker holds what it reads and quantizes of one unit; what it made waits in a buffer for digest
and disk while the worker is at the next. Beside these the process holds the plan itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from moequant.conversion.batches import BATCH_BYTES
from moequant.formats import get_format, tile_bytes
from moequant.formats.squares import TILE_ROWS
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_weights import PartInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.conversion.units import Unit, Weight
    from moequant.weights.source_weights import WeightInfo


_TENSOR_BYTES = 1200
"""For each tensor read or written. Measured of 45,000 to 90,000 read, those of DeepSeek-V3 in BF16
and in FP8, and as many to 134,000 written: 930 to 1090; a tenth more for other names."""
WRITE_BUFFER_BYTES = 8 << 20
"""For each worker, beside one batch: what a digest or a disk may be behind."""
COPY_CHUNK_BYTES = 8 << 20
"""Copied tensors stream through buffers of this size."""


@dataclass(frozen=True, kw_only=True)
class MemoryBound:
    """Upper bounds of the memory that a plan takes, in bytes.

    Attributes:
        units: what is quantized or dequantized.
        tensors: how many tensors are read, and how many pieces are written.
    """

    units: tuple[Unit, ...]
    tensors: int

    def peak_bytes(self, workers: int) -> int:
        """What `workers` may hold at once, beyond the interpreter and torch."""
        unit = max(map(working_bytes, self.units), default=0)
        worker = max(unit + self.batch_bytes, COPY_CHUNK_BYTES)
        return workers * worker + self.buffer_bytes(workers) + self.plan_bytes

    @property
    def plan_bytes(self) -> int:
        """What the plan takes, with the headers read for it and the index made of it."""
        return _TENSOR_BYTES * self.tensors

    def buffer_bytes(self, workers: int) -> int:
        """What may wait to be digested and written while workers are at what follows."""
        return workers * (self.batch_bytes + WRITE_BUFFER_BYTES)

    @cached_property
    def result_bytes(self) -> int:
        """What the weights of a unit take at most."""
        return max((unit.result_bytes for unit in self.units), default=0)

    @cached_property
    def batch_bytes(self) -> int:
        """What results that are written together take at most: one, or those of small units."""
        quantizes = any(not unit.is_plain for unit in self.units)
        return max(self.result_bytes, BATCH_BYTES if quantizes else 0)

    @cached_property
    def read_bytes(self) -> int:
        """What is read at once at most, copies left out."""
        return max((unit.tiles[0].source_bytes for unit in self.units), default=0)


def working_bytes(unit: Unit) -> int:
    """What converting a unit, or a tile of it, takes beside its batch's results."""
    if len(unit.tiles) > 1:
        return working_bytes(unit.tiles[0])
    if unit.is_plain:
        # In a stack, weights are joined and transposed; float32 of a tile lies in between.
        return 3 * unit.source_bytes + 2 * unit.result_bytes + _decoding_bytes(unit.weights)
    format = get_format(unit.format)
    if _stays(unit):
        return _reading_bytes(unit.weights, as_stored=True) + unit.result_bytes
    workspace = max(format.workspace_bytes(weight.info.shape) for weight in unit.weights)
    # Results exist once more while tiles are joined and while codes are put in disk form.
    return _reading_bytes(unit.weights) + unit.result_bytes + workspace


def _stays(unit: Unit) -> bool:
    """Whether codes and scales are written as they are stored, whatever they hold."""
    stored = {weight.stored_format for weight in unit.weights}
    shares_scale = get_format(unit.format).has_global_scale
    return unit.lossless and stored == {unit.format} and not shares_scale


def _decoding_bytes(weights: Sequence[Weight]) -> int:
    """Upper bound of what lies in between while weights are decoded and compared."""
    return max(tile_bytes(weight.info.shape[1], TILE_ROWS) for weight in weights)


def _stands_alone(info: WeightInfo) -> bool:
    """Whether nothing else lies in its tensors."""
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
