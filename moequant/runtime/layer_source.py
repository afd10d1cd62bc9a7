"""Where the weights of experts lie in files, and what they are once their bytes are there.

A source answers for one layer: of an expert, the ranges of bytes to read, under keys that are the
same for every expert; and of the tensors these became, wherever they are, its gate, up and down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from moequant.storage.checkpoint import TensorRange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.layouts.targets import KernelLayout
    from moequant.preparation import PreparedCheckpoint
    from moequant.preparation.layers import LayerFile
    from moequant.weights.converted import ConvertedCheckpoint
    from moequant.weights.encoded import EncodedWeight


class LayerSource(Protocol):
    """The experts of a layer."""

    def ranges(self, expert: int) -> dict[str, TensorRange]:
        """What to read of an expert, by keys that are the same for all."""

    def decode(self, expert: int, tensors: Mapping[str, Tensor]) -> tuple[QuantizedWeight, ...]:
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

    def ranges(self, expert: int) -> dict[str, TensorRange]:
        """As LayerSource.

        Raises:
            CheckpointError: a tensor is missing, or not what it must be.
            UnsupportedError: the expert was not converted.
        """
        return {
            _key(projection, weight, name): where
            for projection, weight in self._encoded(expert).items()
            for name, where in weight.locate(self.converted.checkpoint).items()
        }

    def decode(self, expert: int, tensors: Mapping[str, Tensor]) -> tuple[QuantizedWeight, ...]:
        """As LayerSource."""
        weights = []
        for projection, weight in self._encoded(expert).items():
            read = {name: tensors[_key(projection, weight, name)] for name in weight.places}
            q = weight.decode(weight.pick(read))
            self.converted.check_expert(q, self.layer, expert, projection)
            weights.append(q)
        return tuple(weights)

    def _encoded(self, expert: int) -> dict[str, EncodedWeight]:
        return {
            projection: self.converted.encoded(
                self.converted.expert_module(self.layer, expert, projection)
            )
            for projection in self.converted.moe.projections
        }


def _key(projection: str, weight: EncodedWeight, name: str) -> str:
    """What a range is called: the same for all experts, and for projections that share it."""
    place = weight.places[name]
    return projection + name.removeprefix(weight.module) if place.expert is None else place.tensor


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

    def ranges(self, expert: int) -> dict[str, TensorRange]:
        """As LayerSource."""
        parts = self.file.parts(expert)
        return {name: TensorRange(file=self.file.file, info=info) for name, info in parts.items()}

    def decode(self, expert: int, tensors: Mapping[str, Tensor]) -> tuple[QuantizedWeight, ...]:
        """As LayerSource."""
        return self.file.unpack(expert, tensors, self.layout, self.converted.moe)
