"""Weights as a source holds them: a tensor each, a part of one, or codes and scales to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.errors import NonFiniteError
from moequant.formats import QuantizedWeight, dequantize_into
from moequant.models.stacked import Place
from moequant.storage.buffers import Arena
from moequant.storage.headers import TensorInfo, bit_count
from moequant.weights.encoded import EncodedInfo, read_places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.formats import StoredWeight
    from moequant.models import Model
    from moequant.storage.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """A plain weight [N, K] that is part of a stack, as its headers describe it.

    Attributes:
        name: its name once it is converted.
        dtype: safetensors name.
        shape: N and K, also if it is stored transposed.
        place: where it lies in the stack.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: Place

    @property
    def size_bytes(self) -> int:
        """Its size in the file."""
        return bit_count(self.dtype, self.shape) // 8


WeightInfo = TensorInfo | PartInfo | EncodedInfo
"""A tensor or weight of a source, as its headers describe it."""


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
    """Read weights [N, K], each contiguous; an expert that several share is read once.

    The memory is that of `arena`, if given.

    Raises:
        CheckpointError: as `Checkpoint.read`, or codes and scales do not fit each other.
        UnsupportedError: as `Checkpoint.read`.
    """
    if all(isinstance(info, TensorInfo) for info in infos):
        # The common case, a hundred times a second.
        return [*checkpoint.read_all([(info.name, None) for info in infos], arena)]
    places = [places_of(info) for info in infos]
    read = iter(read_places(checkpoint, [p for of_one in places for p in of_one.values()], arena))
    found: list[StoredWeight] = []
    for info, of_one in zip(infos, places, strict=True):
        tensors = {name: next(read) for name in of_one}
        if isinstance(info, EncodedInfo):
            found.append(info.decode(tensors))
        else:
            found.append(tensors[info.name])
    return found


def decoded(weight: StoredWeight, arena: Arena | None = None) -> Tensor:
    """A weight [N, K] as it is if it is plain, else dequantized to float32."""
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


def places_of(info: WeightInfo) -> Mapping[str, Place]:
    """Where the tensors of a weight lie, each with its name."""
    if isinstance(info, EncodedInfo):
        return info.places
    return {info.name: info.place if isinstance(info, PartInfo) else Place(tensor=info.name)}


def check_bias(source: Checkpoint, info: TensorInfo) -> None:
    """Refuse NaN and Inf in the biases of experts that are converted.

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
            "converted have biases without it. Correct the source checkpoint or fetch it again"
        )
