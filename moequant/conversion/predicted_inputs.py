"""Mean squares of a unit's input, predicted from weights of the source that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.statistics import hidden_mean_square, intermediate_mean_square
from moequant.statistics.gaussian import TILE_BYTES
from moequant.weights.source_weights import read_weights

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.source_weights import WeightInfo

PREDICTION_BYTES = TILE_BYTES
"""Temporary memory of a prediction, besides the weights that it reads."""


@dataclass(frozen=True, kw_only=True)
class PredictedInputs:
    """How the mean squares of the input of a unit's weights are predicted.

    Attributes:
        norm: name of the weight of the norm in front of the experts.
        offset: what the norm adds to its weight.
        before: gate, if there is one, and up, whose outputs the weights multiply; none for gate
            and up themselves.
        act_fn: the function of gate and up.
    """

    norm: str
    offset: float
    before: tuple[WeightInfo, ...]
    act_fn: ActFn

    def mean_square(self, source: Checkpoint) -> Tensor:
        """[K] float32, up to a common factor; raises as `Checkpoint.read`."""
        hidden = hidden_mean_square(source.read(self.norm), self.offset)
        if not self.before:
            return hidden
        *gate, up = read_weights(source, self.before)
        return intermediate_mean_square(gate[0] if gate else None, up, hidden, self.act_fn)
