"""Quantized weights that kernels load as float32.

As in `dequantize` of the format, a number is code * scale, rounded to float32, times the global
scale if there is one, rounded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats import get_format
from moequant.native_code import UnavailableError
from moequant.native_code.vectors import Type
from moequant.quantizers.elements import (
    Source,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_int4,
    unpack_nibbles,
    widen_bfloat16,
)
from moequant.quantizers.operands import LEAST_RUN

if TYPE_CHECKING:
    from collections.abc import Callable

    from moequant.native_code.vectors import Function, Value


_SCALES: dict[torch.dtype, tuple[str, Callable[[Value], Value]]] = {
    torch.float32: ("float", lambda number: number),
    torch.bfloat16: ("i16", widen_bfloat16),
    torch.float8_e4m3fn: ("i8", lambda code: decode_e4m3(code.to("i32"))),
    torch.float8_e8m0fnu: ("i8", lambda code: decode_e8m0(code.to("i32"))),
}
"""By dtype: what is loaded, and how that becomes float32."""
_DECODERS = {"e2m1": decode_e2m1, "e4m3": decode_e4m3, "int4": decode_int4}
"""By element: codes of one byte, or of 16 codes two a byte, to float32."""


class Encoded(Source):
    """Weights of a format, as float32.

    Args:
        format: name of it.
        operand: what the parameters of a kernel that are its scales begin with.
    """

    def __init__(self, format: str, operand: str = "") -> None:
        super().__init__("float32")
        self.least_lanes = LEAST_RUN
        self._format = get_format(format)
        if self._format.element.name not in _DECODERS or self._format.scale_dtype not in _SCALES:
            raise UnavailableError(f"it cannot decode {format}")
        self._operand = operand

    def load(self, function: Function, base: Value, index: Value, lanes: int) -> Value:
        """As Source; `index` and `lanes` are multiples of LEAST_RUN."""
        parts = [self._run(function, base, index + at) for at in range(0, lanes, LEAST_RUN)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [low.beside(high) for low, high in pairs]
        return parts[0].bitcast("i32")

    def prefetch(self, function: Function, base: Value, index: Value) -> None:
        """As Source; codes, not scales."""
        function.prefetch(base, index >> 1 if self._format.codes_per_byte == 2 else index, "i8")

    def _run(self, f: Function, base: Value, index: Value) -> Value:
        """The LEAST_RUN weights from the `index`-th on, which share a scale: float32."""
        format = self._format
        at = index >> f.parameter(f"{self._operand}shift")
        element, decode = _SCALES[format.scale_dtype]
        stored = f.load(Type(element), f.parameter(f"{self._operand}scale"), at)
        scale = decode(stored).splat(LEAST_RUN)
        if format.codes_per_byte == 2:
            codes = unpack_nibbles(f.load(Type("i8", LEAST_RUN // 2), base, index >> 1))
        else:
            codes = f.load(Type("i8", LEAST_RUN), base, index)
        number = _DECODERS[format.element.name](codes.to("i32")) * scale
        if format.has_global_scale:
            number = number * f.parameter(f"{self._operand}global_scale").splat(LEAST_RUN)
        return number
