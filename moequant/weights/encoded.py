"""Quantized weights on disk: where their tensors lie, and how these are read and decoded.

Of a tensor that stacks the experts of a layer only one expert is read at a time, in one contiguous
range of bytes; transposing and picking rows happens in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.dialects import Dialect
    from moequant.dialects.tensors import Block
    from moequant.formats import QuantizedWeight
    from moequant.models import Place
    from moequant.storage.buffers import Arena
    from moequant.storage.checkpoint import Checkpoint, TensorRange
    from moequant.storage.headers import TensorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedWeight:
    """A quantized weight on disk: codes, scales and the like.

    Attributes:
        module: its name without `.weight`.
        format: name of its format.
        dialect: the dialect of its names and encoding.
        places: where each of its tensors lies, by the dialect's name for it.
        block: rows and columns that share a scale, where config.json states them.
    """

    module: str
    format: str
    dialect: Dialect
    places: Mapping[str, Place]
    block: Block | None = None

    @property
    def name(self) -> str:
        """Name of the decoded weight."""
        return f"{self.module}.weight"

    def locate(self, checkpoint: Checkpoint) -> dict[str, TensorRange]:
        """The bytes to read, by the dialect's names; errors as `read_places` and `decode`."""
        if not self.places:
            self.decode({})  # which says what is missing
        return {
            name: checkpoint.locate(place.tensor, _rows(checkpoint, place))
            for name, place in self.places.items()
        }

    def pick(self, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of this weight, from those that were read where `locate` says."""
        return {name: pick(read[name], place) for name, place in self.places.items()}

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight, given its tensors on any device, by the dialect's names.

        Raises:
            CheckpointError: a tensor is missing, or codes and scales do not fit each other.
            UnsupportedError: a scale with values that the format's scale dtype cannot hold.
        """
        return self.dialect.from_disk(self.module, self.format, tensors, block=self.block)

    def read(self, checkpoint: Checkpoint) -> QuantizedWeight:
        """Locate, read and decode; errors as `read_places` and `decode`."""
        found = read_places(checkpoint, [*self.places.values()])
        return self.decode(dict(zip(self.places, found, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedInfo(EncodedWeight):
    """A quantized weight [N, K] of a source, as its headers describe it.

    Attributes:
        shape: N and K.
        parts: its tensors on disk; of a stack, the tensors that hold all experts.
        size_bytes: its size in the file, without the rest of a stack.
    """

    shape: tuple[int, int]
    parts: tuple[TensorInfo, ...]
    size_bytes: int

    @property
    def dtype(self) -> str:
        """Safetensors name of float32, which represents every supported format exactly."""
        return "F32"


def read_places(
    checkpoint: Checkpoint, places: Sequence[Place], arena: Arena | None = None
) -> list[Tensor]:
    """Read the tensor at each place, contiguous; an expert that several share is read once.

    The memory is that of `arena`, if given.

    Raises:
        CheckpointError: as `Checkpoint.read`, or a stack has another shape than it must have.
        UnsupportedError: as `Checkpoint.read`.
    """
    wanted = {(place.tensor, place.expert): _rows(checkpoint, place) for place in places}
    ranges = [(tensor, rows) for (tensor, _), rows in wanted.items()]
    found = dict(zip(wanted, checkpoint.read_all(ranges, arena), strict=True))
    return [pick(found[place.tensor, place.expert], place, arena) for place in places]


def pick(tensor: Tensor, place: Place, arena: Arena | None = None) -> Tensor:
    """The tensor at `place`, contiguous, from the rows that were read for it."""
    if place.expert is not None and place.height is None:
        tensor = tensor[0]
    if place.rows is not None:
        rows = slice(place.rows.start, place.rows.stop, place.rows.step)
        # Rows that lie as columns are picked before they are transposed, which takes half the time.
        tensor = tensor[:, rows].contiguous() if place.transposed else tensor[rows]
    if place.transposed:
        tensor = tensor.T
    if arena is None or tensor.is_contiguous():
        return tensor.contiguous()
    return arena.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _rows(checkpoint: Checkpoint, place: Place) -> slice | None:
    """Range of the tensor's first dimension to read for `place`; None for all."""
    if place.expert is None:
        return None
    shape = checkpoint.info(place.tensor).shape
    if place.extents and shape != place.extents:
        raise CheckpointError(
            f"{place.tensor}: shape {list(shape)}, but by config.json it must be "
            f"{list(place.extents)}; fetch or convert the checkpoint again"
        )
    height = 1 if place.height is None else place.height
    return slice(place.expert * height, (place.expert + 1) * height)
