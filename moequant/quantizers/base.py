"""What a quantizer is: one way to compute what `moequant.formats` defines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moequant.formats import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.formats import QuantizedWeight


class UnavailableError(Exception):
    """A quantizer does not run on this machine; says why. Never reaches a user."""


Allocator = Callable[..., Tensor]
"""Where results go: called as `torch.empty(shape, dtype=dtype)`, for CPU memory of any values."""

Job = tuple[Format, Mapping[str, str], torch.dtype]
"""What a quantizer is made ready for: a format, all its options, and the dtype of the weights."""


class Quantizer(ABC):
    """Computes, from and to CPU memory, the bytes that `Format.quantize_fused` computes."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """How it computes, for people."""

    def allocate(self, size_bytes: int) -> Tensor:
        """CPU memory it likes weights and results to lie in, of any values: uint8 [size_bytes]."""
        # The device is named because `torch.set_default_device` would lend another.
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    @abstractmethod
    def prepare(self, format: Format, options: Mapping[str, str], dtype: torch.dtype) -> None:
        """Make ready for weights of `dtype`; after that, several threads may quantize.

        Raises:
            UnavailableError: these cannot be quantized this way on this machine.
        """

    @abstractmethod
    def quantize_fused(
        self,
        format: Format,
        weights: Sequence[Tensor],
        options: Mapping[str, str],
        *,
        names: Sequence[str],
        empty: Allocator = torch.empty,
    ) -> list[QuantizedWeight]:
        """Quantize weights that engines fuse, such as gate and up of one expert.

        Args:
            format: what to make of them.
            weights: [N, K] each, on the CPU.
            options: of the format, every one with its value.
            names: what errors call the weights.
            empty: may be asked for the memory of the results.

        Raises:
            UnsupportedError: a shape or dtype the format cannot take.
            NonFiniteError: a weight holds NaN or Inf; names it, index and value.
        """
