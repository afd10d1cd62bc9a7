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
    from moequant.formats import QuantizedWeight
    from moequant.models import Place
    from moequant.storage.buffers import Arena
    from moequant.storage.checkpoint import Checkpoint, TensorRange
    from moequant.storage.headers import TensorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedWeight:
    """A weight that several tensors hold: codes, scales and the like.

    Attributes:
        module: its name without `.weight`.
        format: name of what its numbers are in.
        dialect: whose names and encoding it is in.
        places: where each of its tensors lies, by the name the dialect has for it.
    """

    module: str
    format: str
    dialect: Dialect
    places: Mapping[str, Place]

    @property
    def name(self) -> str:
        """What the weight is called once it is decoded."""
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
        """What is this weight's of the tensors that were read where `locate` says."""
        return {name: pick(read[name], place) for name, place in self.places.items()}

    def decode(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight, of what lies at each of its places, on any device.

        Raises:
            CheckpointError: a tensor is missing, or codes and scales do not fit each other.
            UnsupportedError: a scale with values that the format's scale dtype cannot hold.
        """
        return self.dialect.from_disk(self.module, self.format, tensors)

    def read(self, checkpoint: Checkpoint) -> QuantizedWeight:
        """Locate, read and decode; errors as `read_places` and `decode`."""
        found = read_places(checkpoint, [*self.places.values()])
        return self.decode(dict(zip(self.places, found, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedInfo(EncodedWeight):
    """What is known of a quantized weight [N, K] of a source from headers.

    Attributes:
        shape: N and K.
        parts: its tensors on disk; of a stack, the tensors that hold all experts.
        size_bytes: what it alone takes in the file.
    """

    shape: tuple[int, int]
    parts: tuple[TensorInfo, ...]
    size_bytes: int

    @property
    def dtype(self) -> str:
        """What it is decoded to, a safetensors name: float32 rounds no format that we read."""
        return "F32"


def read_places(
    checkpoint: Checkpoint, places: Sequence[Place], arena: Arena | None = None
) -> list[Tensor]:
    """Read what lies at each place, contiguous; what several of them share is read once.

    Into the memory of `arena`, if there is one.

    Raises:
        CheckpointError: as `Checkpoint.read`, or a tensor has not the extents it must have.
        UnsupportedError: as `Checkpoint.read`.
    """
    wanted = {(place.tensor, place.expert): _rows(checkpoint, place) for place in places}
    ranges = [(tensor, rows) for (tensor, _), rows in wanted.items()]
    found = dict(zip(wanted, checkpoint.read_all(ranges, arena), strict=True))
    return [pick(found[place.tensor, place.expert], place, arena) for place in places]


def pick(tensor: Tensor, place: Place, arena: Arena | None = None) -> Tensor:
    """What is at `place`, contiguous, of the bytes that were read for it."""
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
    """What of its tensor's first dimension lies at `place`; None for all."""
    if place.expert is None:
        return None
    shape = checkpoint.info(place.tensor).shape
    if shape[: len(place.extents)] != place.extents:
        raise CheckpointError(
            f"{place.tensor}: shape {list(shape)}, but by config.json it begins with "
            f"{list(place.extents)}; fetch or convert the checkpoint again"
        )
    height = 1 if place.height is None else place.height
    return slice(place.expert * height, (place.expert + 1) * height)
