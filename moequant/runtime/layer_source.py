"""Where the weights of a layer's experts lie in files, and how they are decoded once read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.storage.checkpoint import TensorRange
    from moequant.weights.converted import ConvertedCheckpoint
    from moequant.weights.encoded import EncodedWeight


@dataclass(frozen=True, kw_only=True)
class PortableLayer:
    """A layer of a converted checkpoint."""

    converted: ConvertedCheckpoint
    layer: int

    def ranges(self, expert: int) -> dict[str, TensorRange]:
        """What to read of an expert, by keys that are the same for all.

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
        """Gate, up and down of an expert, or up and down, of what was read for its ranges.

        Raises:
            CheckpointError: a tensor is not what it must be.
            UnsupportedError: the expert was not converted.
        """
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
