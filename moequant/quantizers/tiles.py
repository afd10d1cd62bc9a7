"""The reference functions themselves: what there is where nothing faster runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.quantizers.base import Quantizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.formats import Format, QuantizedWeight
    from moequant.quantizers.base import Allocator


class TorchQuantizer(Quantizer):
    """`Format.quantize_fused`, tile by tile and torch operation by torch operation."""

    name = "torch"
    summary = "the reference functions, one torch operation after the other"

    def prepare(self, format: Format, options: Mapping[str, str], dtype: torch.dtype) -> None:
        """As Quantizer; nothing to do."""

    def quantize_fused(
        self,
        format: Format,
        weights: Sequence[Tensor],
        options: Mapping[str, str],
        *,
        names: Sequence[str],
        empty: Allocator = torch.empty,
    ) -> list[QuantizedWeight]:
        """As Quantizer; torch allocates the results."""
        del empty
        return format.quantize_fused(weights, options, names=names)
