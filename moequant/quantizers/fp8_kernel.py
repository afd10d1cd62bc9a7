"""E4M3 with a FP32 scale for blocks of rows and columns, of whole rows, or a given one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.nn.functional import pad

from moequant.formats.base import WEIGHTED
from moequant.formats.elements import E4M3_FLOAT32_MAX, E4M3_MAX, FLOAT32_TINY
from moequant.formats.fp8_block import SEARCH_FACTORS
from moequant.native_code.vectors import F32, I32, I64, Type
from moequant.quantizers.elements import E4M3, clamped, float_bits, group_sum
from moequant.quantizers.native_kernel import NativeKernel
from moequant.quantizers.operands import new_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from moequant.formats import Format
    from moequant.native_code.vectors import Function, Value
    from moequant.quantizers.elements import Source

_TILE = 128
"""Weights that are encoded at a time."""
_EXPONENT = 0xFF << 23
_LINE = 32
"""Weights of two bytes in a line of the cache."""


class _Block(NamedTuple):
    """Rows from `top` to `bottom` and columns from `left` to `right`, which share a scale."""

    top: Value
    bottom: Value
    left: Value
    right: Value


class Fp8Kernel(NativeKernel):
    """See the module."""

    def __init__(self, format: Format, source: Source, options: Mapping[str, str]) -> None:
        self._format, self._source = format, source
        self._rule = options.get("scale", "float32")
        self._weighted = options.get("search") == WEIGHTED
        self._f = f = new_kernel()
        self._w = f.parameter("w")
        self._rows, self._columns = f.parameter("rows"), f.parameter("columns")

    def write(self) -> Function:
        """See `NativeKernel`."""
        f = self._f
        zero = f.constant(I64, 0)
        largest = f.variable(f.constant(Type(self._source.element), 0))
        index = f.variable(zero)
        factors = SEARCH_FACTORS[self._rule] if self._weighted else ()
        sums = {factor: f.array(F32, _TILE) for factor in factors}
        block_rows, block_columns = self._format.block
        with (
            f.loop(zero, self._rows, block_rows) as top,
            f.loop(zero, self._columns, block_columns) as left,
        ):
            bottom = self._rows.umin(top + block_rows)
            block = _Block(top, bottom, left, self._columns.umin(left + block_columns))
            block_max = self._largest(block)
            largest.set(largest.get().umax(block_max))
            scale = self._scale(block_max)
            if sums:
                scale = self._least_squares(scale, block, sums)
            f.store(scale, f.parameter("scale"), index.get())
            index.set(index.get() + 1)
            self._encode(block, scale)
        f.give(largest.get().to("i32"))
        return f

    @staticmethod
    def padded_importance(importance: Tensor, group: int) -> Tensor:
        """See `NativeKernel`: with zeros to the end of a ragged block."""
        return pad(importance, (0, -len(importance) % _TILE))

    def _strips(self, block: _Block) -> Iterator[tuple[int, AbstractContextManager[Value]]]:
        return self._f.strips(block.left, block.right, _TILE, self._source.least_lanes)

    def _largest(self, block: _Block) -> Value:
        """The bits of the largest magnitude."""
        f, source = self._f, self._source
        strips = (_TILE, source.least_lanes)
        found = {n: f.variable(f.constant(Type(source.element, n), 0)) for n in strips}
        with f.loop(block.top, block.bottom, 1) as row:
            start = row * self._columns
            for lanes, loop in self._strips(block):
                with loop as column:
                    stored = source.load(f, self._w, start + column, lanes)
                    found[lanes].set(found[lanes].get().umax(source.magnitude(stored)))
        maxima = [one.get().reduce("umax") for one in found.values()]
        return maxima[0].umax(maxima[1])

    def _scale(self, block_max: Value) -> Value:
        if self._format.shares_scale:
            return self._f.parameter("global_scale")
        amax = self._source.float(block_max).bitcast("i32").umin(float_bits(E4M3_FLOAT32_MAX))
        scale = (amax.bitcast("float") / E4M3_MAX).bitcast("i32")
        if self._rule == "power_of_two":
            scale = (scale + 0x7FFFFF) & _EXPONENT
        scale = scale.umax(float_bits(FLOAT32_TINY))
        return self._f.constant(F32, 1.0).where(amax.equals(0), scale.bitcast("float"))

    def _least_squares(self, scale: Value, block: _Block, sums: Mapping[float, Value]) -> Value:
        """The scale times the factor with the least squared error; `sums` has room by factor."""
        f, zero = self._f, self._f.constant(I64, 0)
        for total in sums.values():
            f.store(f.constant(Type("float", _TILE), 0.0), total, zero)
        self._add_squares(scale, block, sums)
        errors = [
            group_sum(
                f.load(Type("float", _TILE), total, zero)
                * f.load(Type("float", _TILE), f.parameter("importance"), block.left)
            )
            for total in sums.values()
        ]
        best, least = scale, errors[0]
        for factor, error in list(zip(sums, errors, strict=True))[1:]:
            smaller = scale * factor
            tiny = smaller < FLOAT32_TINY
            better = (error < least) & f.constant(Type("i1"), 0).where(tiny, 1)
            best, least = smaller.where(better, best), error.where(better, least)
        return best

    def _add_squares(self, scale: Value, block: _Block, sums: Mapping[float, Value]) -> None:
        """Add each column's squared errors by the factor of the scale."""
        f, source = self._f, self._source
        with f.loop(block.top, block.bottom, 1) as row:
            for lanes, loop in self._strips(block):
                with loop as column:
                    stored = source.load(f, self._w, row * self._columns + column, lanes)
                    x = self._scaled(source.float(stored), scale)
                    for factor, total in sums.items():
                        off = E4M3.round(x / factor) * factor - x
                        before = f.load(Type("float", lanes), total, column - block.left)
                        f.store(before + off * off, total, column - block.left)

    def _encode(self, block: _Block, scale: Value) -> None:
        f, source = self._f, self._source
        with f.loop(block.top, block.bottom, 1) as row:
            start = row * self._columns
            for lanes, loop in self._strips(block):
                with loop as column:
                    stored = source.load(f, self._w, start + column, lanes)
                    # The next block: rows lie too far apart for the processor to see it come.
                    for i in range(0, lanes, _LINE):
                        source.prefetch(f, self._w, start + column + (_TILE + i))
                    f.store(self._codes(stored, scale), f.parameter("qdata"), start + column)

    def _codes(self, stored: Value, scale: Value) -> Value:
        source = self._source
        signs = (source.tops(stored) >> 8) & 0x80
        if stored.type.lanes == 1:
            return self._code(source.float(stored), scale).to("i8") | signs.to("i8")
        # Pairs need no widening, and stay together until they are bytes.
        even, odd = (self._code(w, scale) for w in source.pairs(stored))
        return ((even | (odd << 16)).bitcast("i16") | signs).to("i8")

    def _code(self, w: Value, scale: Value) -> Value:
        # A search may clip.
        encode = E4M3.encode if self._weighted else E4M3.encode_clamped
        return encode(self._scaled(w, scale))

    def _scaled(self, w: Value, scale: Value) -> Value:
        held = clamped(w, E4M3_FLOAT32_MAX)
        if self._rule == "power_of_two":
            return held * _reciprocal(scale).splat(w.type.lanes)
        return held / scale.splat(w.type.lanes)


def _reciprocal(power: Value) -> Value:
    """1 / 2**k, as float32, of 2**k for -126 <= k <= 126."""
    bits = power.bitcast("i32")
    return (power.function.constant(I32, 254 << 23) - bits).bitcast("float")
