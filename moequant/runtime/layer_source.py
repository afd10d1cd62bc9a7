"""Where the weights of experts lie in files, and what they are once their bytes are there.

A source answers for one layer: of an expert, the ranges of bytes to read, under keys that are the
same for every expert; and of the tensors these became, wherever they are, its gate, up and down.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moequant.storage.checkpoint import Checkpoint
from moequant.storage.headers import DTYPES
from moequant.weights.converted import stored_places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.layouts.targets import KernelLayout
    from moequant.models import Place
    from moequant.preparation import PreparedCheckpoint
    from moequant.preparation.layers import LayerFile
    from moequant.storage.buffers import Arena
    from moequant.storage.headers import TensorInfo
    from moequant.storage.reader import FixedFile
    from moequant.weights.converted import ConvertedCheckpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Bytes of a file that are a tensor, or one index of its first dimension.

    Attributes:
        file: where they are.
        info: name of the tensor; dtype, shape and position of these bytes.
    """

    file: FixedFile
    info: TensorInfo


class LayerSource(Protocol):
    """The experts of a layer."""

    def ranges(self, expert: int) -> dict[str, Range]:
        """What to read of an expert, by keys that are the same for all."""

    def decode(
        self, expert: int, ranges: Mapping[str, Range], tensors: Mapping[str, Tensor]
    ) -> tuple[QuantizedWeight, ...]:
        """Gate, up and down of an expert, or up and down, of what was read for its ranges.

        Raises:
            CheckpointError: a tensor is missing, or not what it must be.
            UnsupportedError: the expert was not converted.
        """


@dataclass(frozen=True, kw_only=True)
class PortableLayer:
    """A layer of a converted checkpoint."""

    converted: ConvertedCheckpoint
    layer: int

    def ranges(self, expert: int) -> dict[str, Range]:
        """As LayerSource."""
        found = {}
        for projection in self.converted.moe.projections:
            module = self.converted.expert_module(self.layer, expert, projection)
            for name, place in _places(self.converted, module).items():
                # A stack is read once for the projections that share it.
                stacked = place.expert is not None
                key = place.tensor if stacked else projection + name.removeprefix(module)
                found[key] = range_of(self.converted.checkpoint, place)
        return {key: where for key, where in found.items() if where is not None}

    def decode(
        self, expert: int, ranges: Mapping[str, Range], tensors: Mapping[str, Tensor]
    ) -> tuple[QuantizedWeight, ...]:
        """As LayerSource."""
        here = with_tensors(self.converted, ranges, tensors)
        return tuple(here.read_expert(self.layer, expert, p) for p in here.moe.projections)


@dataclass(frozen=True, kw_only=True)
class PreparedLayerSource:
    """A layer of a prepared folder."""

    converted: ConvertedCheckpoint
    file: LayerFile
    layout: KernelLayout

    @classmethod
    def open(cls, prepared: PreparedCheckpoint, layer: int) -> PreparedLayerSource:
        """Errors as `PreparedCheckpoint.open_layer`."""
        file, layout = prepared.open_layer(layer)
        return cls(converted=prepared.converted, file=file, layout=layout)

    def ranges(self, expert: int) -> dict[str, Range]:
        """As LayerSource."""
        parts = self.file.parts(expert)
        return {name: Range(file=self.file.file, info=info) for name, info in parts.items()}

    def decode(
        self, expert: int, ranges: Mapping[str, Range], tensors: Mapping[str, Tensor]
    ) -> tuple[QuantizedWeight, ...]:
        """As LayerSource."""
        return self.file.unpack(expert, tensors, self.layout, self.converted.moe)


def module_ranges(converted: ConvertedCheckpoint, module: str) -> dict[str, Range]:
    """What to read of a converted module that is no expert, by name of the tensor."""
    ranges = {
        name: range_of(converted.checkpoint, place)
        for name, place in _places(converted, module).items()
    }
    return {name: where for name, where in ranges.items() if where is not None}


def range_of(checkpoint: Checkpoint, place: Place) -> Range | None:
    """The bytes at a place; None where `Checkpoint.read` has a word to say about it."""
    info = checkpoint.tensors.get(place.tensor)
    if info is None or info.dtype not in DTYPES:
        return None
    if place.expert is not None:
        if not info.shape or place.expert >= info.shape[0]:
            return None
        size_bytes = info.size_bytes // info.shape[0]
        start = info.start + place.expert * size_bytes
        info = info._replace(shape=(1, *info.shape[1:]), start=start, stop=start + size_bytes)
    return Range(file=checkpoint.weight_files()[info.file], info=info)


def with_tensors(
    converted: ConvertedCheckpoint, ranges: Mapping[str, Range], tensors: Mapping[str, Tensor]
) -> ConvertedCheckpoint:
    """The checkpoint, with what was read for `ranges` at hand."""
    source = converted.checkpoint
    fields = {f.name: getattr(source, f.name) for f in dataclasses.fields(Checkpoint)}
    at_hand = {where.info.name: tensors[key] for key, where in ranges.items()}
    return dataclasses.replace(converted, checkpoint=_AtHand(**fields, at_hand=at_hand))


@dataclass(frozen=True, kw_only=True)
class _AtHand(Checkpoint):
    """A checkpoint of which some tensors, or the one index wanted of them, were read already."""

    at_hand: Mapping[str, Tensor]

    def read_all(
        self, ranges: Sequence[tuple[str, slice | None]], arena: Arena | None = None
    ) -> list[Tensor]:
        """As Checkpoint, but for where it is."""
        left = iter(super().read_all([r for r in ranges if r[0] not in self.at_hand], arena))
        return [self.at_hand[name] if name in self.at_hand else next(left) for name, _ in ranges]


def _places(converted: ConvertedCheckpoint, module: str) -> dict[str, Place]:
    """Where the tensors of a module lie, by the names the dialect has for them; {} if kept."""
    format = converted.format_of(module)
    if format is None:
        return {}
    return stored_places(converted.architecture, converted.moe, converted.dialect, module, format)
