"""What others store weights in and moequant reads as a source alone: numbers, no quantizer.

| format | code | scale | who |
|---|---|---|---|
| fp8_channel | E4M3 | one for each row, or one for all | llm-compressor's FP8_DYNAMIC, FP8 |
| int4 | INT4 | one for each group of any width, or for each row | W4A16; Kimi-K2-Thinking |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from moequant.formats.blocks import grouped
from moequant.formats.elements import decode_e4m3, decode_int4, unpack_nibbles

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.formats.base import QuantizedWeight


class StoredFormat(ABC):
    """Numbers that can be decoded; no weight is ever quantized to them."""

    name: ClassVar[str]
    block: ClassVar[tuple[int, int]] = (1, 1)
    """Rows that share a scale; columns do as its shape says."""

    @abstractmethod
    def dequantize(self, q: QuantizedWeight) -> Tensor:
        """Decode to [N, K] float32: code * scale."""


class Fp8Channel(StoredFormat):
    """`w = qdata * scale`, float8_e4m3fn [N, K] and float32 [N, 1]."""

    name = "fp8_channel"

    def dequantize(self, q: QuantizedWeight) -> Tensor:
        """[N, K] float32, exact where the scale is a power of two."""
        return decode_e4m3(q.qdata) * q.scale


class Int4(StoredFormat):
    """`w = qdata * scale`, two's complement nibbles uint8 [N, K / 2] and float32 [N, K / group]."""

    name = "int4"

    def dequantize(self, q: QuantizedWeight) -> Tensor:
        """[N, K] float32, exact where the scale has at most 20 significant bits, as BF16's 8."""
        group = q.shape[1] // q.scale.shape[1]
        codes = grouped(decode_int4(unpack_nibbles(q.qdata)), group)
        return (codes * q.scale.unsqueeze(-1)).reshape(q.shape)
