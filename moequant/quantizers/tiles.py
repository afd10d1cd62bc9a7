"""The quantizer that runs the reference functions, for machines without the native one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.quantizers.base import Quantizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.formats import Format, QuantizedWeight, StoredWeight
    from moequant.quantizers.base import Allocator, Stored


class TorchQuantizer(Quantizer):
    """Runs `Format.quantize_fused`."""

    name = "torch"
    summary = "the reference functions, in torch operations"

    def prepare(self, format: Format, options: Mapping[str, str], stored: Stored) -> None:
        """As Quantizer; nothing to do."""

    def prepare_decoding(self, stored: str, dtype: torch.dtype) -> None:
        """As Quantizer; nothing to do."""

    def prepare_comparing(self, before: Stored, after: Stored) -> None:
        """As Quantizer; nothing to do."""

    def quantize_fused(
        self,
        format: Format,
        weights: Sequence[StoredWeight],
        options: Mapping[str, str],
        *,
        names: Sequence[str],
        empty: Allocator = torch.empty,
        scratch: Allocator = torch.empty,
    ) -> list[QuantizedWeight]:
        """As Quantizer; torch allocates the results."""
        del empty
        numbers = self._numbers(weights, names, scratch)
        return format.quantize_fused(numbers, options, names=names)
