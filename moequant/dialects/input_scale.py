"""The tensor with a static scale of a weight's input, as a dialect stores it beside a format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.formats import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class InputScale:
    """Name, shape and meaning of the tensor, which is float32.

    Attributes:
        suffix: last component of its name.
        shape: [] or [1].
        divides: whether it holds a divisor, the reciprocal of the scale rounded to float32.
        of_layer: whether engines take the largest of a layer for all of its experts, as of FP8
            inputs, which are quantized before they go to experts; else each counts.
        leaves: what the last component of a module's name is beside it, where that differs.
    """

    suffix: str
    shape: tuple[int, ...] = ()
    divides: bool = False
    of_layer: bool = False
    leaves: tuple[tuple[str, str], ...] = ()

    def name_of(self, module: str) -> str:
        """Its name beside the weight of `module`."""
        parent, dot, leaf = module.rpartition(".")
        return f"{parent}{dot}{dict(self.leaves).get(leaf, leaf)}.{self.suffix}"

    def module_of(self, module: str) -> str:
        """The module of the weight beside which it lies, by its own name without the suffix."""
        parent, dot, leaf = module.rpartition(".")
        weights = {own: weight for weight, own in self.leaves}
        return f"{parent}{dot}{weights.get(leaf, leaf)}"

    def is_usable(self, stored: float) -> bool:
        """Whether a number, as stored, stands for a scale that is positive and finite."""
        scale = self.multiplier(torch.tensor(stored)).item()
        return 0 < scale < math.inf

    @property
    def spec(self) -> TensorSpec:
        """Its dtype and shape."""
        return TensorSpec(dtype=torch.float32, shape=self.shape)

    def stored(self, multiplier: Tensor) -> Tensor:
        """The tensor for a scale that multiplies, [] float32."""
        return (multiplier.reciprocal() if self.divides else multiplier).reshape(self.shape)

    def multiplier(self, stored: Tensor) -> Tensor:
        """The scales that multiply, of tensors as `stored` returns, in any shape and dtype."""
        return stored.float().reciprocal() if self.divides else stored.float()
