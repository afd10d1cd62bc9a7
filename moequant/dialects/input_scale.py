"""The tensor with a static scale of a weight's input, as a dialect stores it beside a format."""

from __future__ import annotations

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
    """

    suffix: str
    shape: tuple[int, ...] = ()
    divides: bool = False

    def name_of(self, module: str) -> str:
        """Its name beside the weight of `module`."""
        return f"{module}.{self.suffix}"

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
