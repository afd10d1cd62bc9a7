"""Weights as a source holds them: a tensor each, a part of one, or codes and scales to decode.

Of a tensor that stacks the experts of a layer only one expert is read at a time, in one contiguous
range of bytes; transposing and picking rows happens in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError
from moequant.formats import QuantizedWeight, dequantize_into
from moequant.models.stacked import Place
from moequant.storage.buffers import Arena
from moequant.storage.headers import TensorInfo, bit_count
from moequant.weights.encoded import EncodedInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.formats import StoredWeight
    from moequant.models import Model
    from moequant.storage.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """What is known of a weight [N, K] that lies in a tensor with others.

    Attributes:
        name: what it is called once it is converted.
        dtype: safetensors name.
        shape: N and K, however it lies.
        place: where that is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: Place

    @property
    def size_bytes(self) -> int:
        """Bytes it takes in the file."""
        return bit_count(self.dtype, self.shape) // 8


WeightInfo = TensorInfo | PartInfo | EncodedInfo
"""What is known of a weight that is read as a whole."""


def unstacked(
    tensors: Mapping[str, TensorInfo | EncodedInfo], model: Model
) -> dict[str, WeightInfo]:
    """The tensors of a checkpoint, in order, with the plain experts of each stack in its place."""
    parts: dict[str, list[PartInfo]] = {}
    for name, place in model.places.items():
        projection = model.roles[name].projection
        assert projection is not None, name
        parts.setdefault(place.tensor, []).append(
            PartInfo(
                name=name,
                dtype=tensors[place.tensor].dtype,
                shape=model.moe.shape(projection),
                place=place,
            )
        )
    infos: dict[str, WeightInfo] = {}
    for name, info in tensors.items():
        infos.update({part.name: part for part in parts[name]} if name in parts else {name: info})
    return infos


def read_stored(
    checkpoint: Checkpoint, infos: Sequence[WeightInfo], arena: Arena | None = None
) -> list[StoredWeight]:
    """Read weights [N, K], each contiguous; an expert that several of them share is read once.

    Into the memory of `arena`, if there is one.

    Raises:
        CheckpointError: as `Checkpoint.read`, or codes and scales do not fit each other.
        UnsupportedError: as `Checkpoint.read`.
    """
    if all(isinstance(info, TensorInfo) for info in infos):
        # The common case, a hundred times a second.
        return [*checkpoint.read_all([(info.name, None) for info in infos], arena)]
    places = [_places(info) for info in infos]
    read = iter(read_places(checkpoint, [p for of_one in places for p in of_one.values()], arena))
    found: list[StoredWeight] = []
    for info, of_one in zip(infos, places, strict=True):
        tensors = {name: next(read) for name in of_one}
        if isinstance(info, EncodedInfo):
            found.append(info.dialect.from_disk(info.module, info.format, tensors))
        else:
            found.append(tensors[info.name])
    return found


def decoded(weight: StoredWeight, arena: Arena | None = None) -> Tensor:
    """The numbers of a weight [N, K]: as they are where they are plain, else float32."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    numbers = (arena or Arena()).empty(weight.shape, dtype=torch.float32)
    dequantize_into(weight, numbers)
    return numbers


def read_weights(
    checkpoint: Checkpoint, infos: Sequence[WeightInfo], arena: Arena | None = None
) -> list[Tensor]:
    """Read weights [N, K] and decode those that are quantized; as `read_stored`."""
    return [decoded(weight, arena) for weight in read_stored(checkpoint, infos, arena)]


def read_places(
    checkpoint: Checkpoint, places: Sequence[Place], arena: Arena | None = None
) -> list[Tensor]:
    """Read what lies at each place; as `read_stored`.

    Raises:
        CheckpointError: as `Checkpoint.read`, or a tensor has not the extents it must have.
        UnsupportedError: as `Checkpoint.read`.
    """
    wanted = {(place.tensor, place.expert): _rows(checkpoint, place) for place in places}
    ranges = [(tensor, rows) for (tensor, _), rows in wanted.items()]
    found = dict(zip(wanted, checkpoint.read_all(ranges, arena), strict=True))
    return [_pick(found[place.tensor, place.expert], place, arena) for place in places]


def _places(info: WeightInfo) -> Mapping[str, Place]:
    """Where the tensors of a weight lie, by a name for each."""
    if isinstance(info, EncodedInfo):
        return info.places
    return {info.name: info.place if isinstance(info, PartInfo) else Place(tensor=info.name)}


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


def _pick(tensor: Tensor, place: Place, arena: Arena | None) -> Tensor:
    """What is at `place`, contiguous, of what is read there."""
    if place.expert is not None and place.height is None:
        tensor = tensor[0]
    if place.rows is not None:
        rows = slice(place.rows.start, place.rows.stop, place.rows.step)
        # Rows that lie as columns are picked before they are turned: half the time of both at once.
        tensor = tensor[:, rows].contiguous() if place.transposed else tensor[rows]
    if place.transposed:
        tensor = tensor.T
    if arena is None or tensor.is_contiguous():
        return tensor.contiguous()
    return arena.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
