"""Sums over the tokens of a layer, and what the file holds of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.statistics.inputs import HIDDEN, INPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class InputSums:
    """Of one input of a layer's experts, on the CPU.

    Attributes:
        square_sum: [E, K] float64, the sum of squares of each channel over the expert's tokens.
        amax: [E] float32, the largest magnitude; 0 for an expert without tokens.
    """

    square_sum: Tensor
    amax: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerSums:
    """Of one layer.

    Attributes:
        tokens: [E] int64, tokens that each expert saw.
        inputs: by name, `hidden` and `intermediate`.
    """

    tokens: Tensor
    inputs: Mapping[str, InputSums]

    def to_tensors(self, layer: int) -> dict[str, Tensor]:
        """The tensors of the file, as `moequant.statistics.tensors` describes them."""
        found = {f"layers.{layer}.tokens": self.tokens}
        seen = self.tokens.clamp(min=1).double()
        total = max(int(self.tokens.sum()), 1)
        for name in INPUTS:
            sums, prefix = self.inputs[name], f"layers.{layer}.{name}"
            pooled = sums.square_sum.sum(0) / total
            if name != HIDDEN:
                pooled = pooled.mean().expand(pooled.shape)
            found[f"{prefix}.amax"] = sums.amax
            found[f"{prefix}.mean_square"] = (sums.square_sum / seen[:, None]).to(torch.float32)
            found[f"{prefix}.pooled_mean_square"] = pooled.to(torch.float32).contiguous()
        return found
