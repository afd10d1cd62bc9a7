"""INT4 codes with a BF16 scale for each group; `scratch` holds the scales of some rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.formats.base import WEIGHTED
from moequant.formats.elements import E4M3_MAX, E4M3_SMALLEST, INT4_MAX, INT4_MIN
from moequant.formats.w4a8 import (
    CHANNEL_SCALE_MIN,
    GROUP,
    GROUP_SCALE_MAX,
    LARGEST_CODE,
    NEAR_STEPS,
    SCALE_MAX,
    SEARCH_FACTORS,
    TABLE_HEADROOM,
    WEIGHTED_FACTORS,
)
from moequant.native_code.vectors import F32, I32, I64, Type
from moequant.quantizers.elements import (
    E4M3,
    encode_int4,
    encode_near_int4,
    float_bits,
    group_sum,
    join_nibbles,
    round_int4,
    round_to_bfloat16,
    widen_bfloat16,
)
from moequant.quantizers.group_kernels import GROUPS
from moequant.quantizers.native_kernel import NativeKernel
from moequant.quantizers.operands import new_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.formats import Format
    from moequant.native_code.vectors import Function, Value, Variable
    from moequant.quantizers.elements import Source

_ROWS = 16
"""Rows whose scales are computed before their codes: few enough to stay in the cache, and enough
for a processor not to wait for each row's scale; also how far ahead weights are fetched."""
_PAIRED = 32
"""Weights that are encoded at a time as pairs of even and odd columns."""


class W4a8Kernel(NativeKernel):
    """See the module."""

    def __init__(self, format: Format, source: Source, options: Mapping[str, str]) -> None:
        self._source = source
        self._weighted = options["search"] == WEIGHTED
        self._wide = self._weighted and options["search_range"] == "wide"
        self._f = f = new_kernel()
        factors = WEIGHTED_FACTORS if self._wide else SEARCH_FACTORS
        searches = options["search"] != "none"
        self._tried = [f.constant(F32, number) for number in factors if searches]
        self._w, self._scales = f.parameter("w"), f.parameter("scratch")
        self._rows, self._columns = f.parameter("rows"), f.parameter("columns")
        self._groups = self._columns // GROUP
        self._largest = f.variable(f.constant(Type(source.element), 0))

    def write(self) -> Function:
        """See `NativeKernel`."""
        f = self._f
        with f.loop(f.constant(I64, 0), self._rows, _ROWS) as top:
            bottom = self._rows.umin(top + _ROWS)
            first = top * self._groups
            with f.loop(top, bottom, 1) as row:
                row_max = f.variable(f.constant(I32, 0))
                start = row * self._groups
                self._find_steps(start, first, row_max)
                self._find_scales(start, first, row_max)
            self._encode(first, bottom)
        f.give(self._largest.get().to("i32"))
        return f

    @staticmethod
    def scratch_count(groups: int) -> int:
        """See `NativeKernel`: the scales of some rows."""
        return _ROWS * groups + GROUPS - 1

    def _find_steps(self, start: Value, first: Value, row_max: Variable) -> None:
        """The step of each group from `start` on, and the largest of the row.

        Args:
            start: the row's first group.
            first: the group whose scale is the first in memory.
            row_max: the bits of the largest.
        """
        f, source, largest = self._f, self._source, self._largest
        with f.loop(start, start + self._groups, 1) as index:
            stored = source.load(f, self._w, index * GROUP, GROUP)
            high, low = source.extremes(stored)
            largest.set(largest.get().umax(high).umax(low))
            step = _step(source, high, low)
            if self._tried:
                importance = self._importance(index - start)
                tried = self._tried
                step = step * _best(source.float(stored), step, tried, tried, importance)
            row_max.set(row_max.get().umax(step.bitcast("i32")))
            f.store(step, self._scales, index - first)

    def _find_scales(self, start: Value, first: Value, row_max: Variable) -> None:
        """The scale of each group of a row, for the step that is there; as `_find_steps`."""
        f = self._f
        row_scale = _row_scale(row_max.get())
        # Goes beyond the row's end, where the next row puts its steps after that.
        together = 1 if self._wide else GROUPS
        with f.loop(start, start + self._groups, together) as index:
            step = f.load(Type("float", together), self._scales, index - first)
            group_code = _group_code(step, row_scale)
            scale = _scale_of_code(group_code, row_scale)
            if self._wide:
                near = [scale]
                stored = self._source.load(f, self._w, index * GROUP, GROUP)
                for more in NEAR_STEPS:
                    beside = (group_code + more).smax(1).umin(LARGEST_CODE)
                    near.append(_scale_of_code(beside, row_scale))
                ratios = [one / _unit(step) for one in near]
                importance = self._importance(index - start)
                best = _best(self._source.float(stored), step, ratios, near, importance)
                # The row's scales follow from its largest.
                scale = scale.where(step.bitcast("i32").equals(row_max.get()), best)
            f.store(scale, self._scales, index - first)

    def _importance(self, group: Value) -> Value | None:
        """Of the columns of a group of a row; None where all count alike."""
        if not self._weighted:
            return None
        address = self._f.parameter("importance")
        return self._f.load(Type("float", GROUP), address, group * GROUP)

    def _encode(self, first: Value, bottom: Value) -> None:
        """Scales and codes of the groups from `first` on, up to the row `bottom`."""
        f, source = self._f, self._source
        with f.loop(first, bottom * self._groups, 1) as index:
            scale = f.load(F32, self._scales, index - first)
            f.store(round_to_bfloat16(scale), f.parameter("scale"), index)
            for i in range(0, GROUP, _PAIRED):
                at = index * GROUP + i
                # Or the search for extremes, which has little to do, would wait for memory.
                source.prefetch(f, self._w, at + self._columns * _ROWS)
                weights = source.pairs(source.load(f, self._w, at, _PAIRED))
                even, odd = (self._code(x, scale) for x in weights)
                f.store(join_nibbles(even, odd), f.parameter("qdata"), at // 2)

    def _code(self, x: Value, scale: Value) -> Value:
        if self._source.dtype == "float32":
            return encode_int4(x / scale.splat(x.type.lanes))
        return encode_near_int4(x * (self._f.constant(F32, 1.0) / scale).splat(x.type.lanes))


def _step(source: Source, high: Value, low: Value) -> Value:
    """The step a group asks for, from the magnitudes of its largest and its smallest weight."""
    above = source.float(high) / float(INT4_MAX + 1)
    below = source.float(low) / float(1 - INT4_MIN)
    return above.bitcast("i32").umax(below.bitcast("i32")).bitcast("float")


def _best(
    w: Value,
    step: Value,
    factors: list[Value],
    results: list[Value],
    importance: Value | None,
) -> Value:
    """The result beside the factor of `step` with the least squared error of a group."""
    x = w / _unit(step).splat(GROUP)
    best, least = results[0], w.function.constant(F32, float("inf"))
    for factor, result in zip(factors, results, strict=True):
        wide = factor.splat(GROUP)
        off = round_int4(x / wide) * wide - x
        squares = off * off if importance is None else off * off * importance
        error = group_sum(squares)
        better = error < least
        best, least = result.where(better, best), error.where(better, least)
    return best


def _unit(step: Value) -> Value:
    return step.function.constant(F32, 1.0).where(step.equals(0), step)


def _group_code(step: Value, row_scale: Value) -> Value:
    """The E4M3 code of the group scale nearest to each step."""
    in_row = step / row_scale.splat(step.type.lanes)
    return E4M3.encode(in_row.clamp(E4M3_SMALLEST, GROUP_SCALE_MAX))


def _scale_of_code(code: Value, row_scale: Value) -> Value:
    scale = E4M3.decode(code) * row_scale.splat(code.type.lanes)
    return widen_bfloat16(round_to_bfloat16(scale))


def _row_scale(row_max_bits: Value) -> Value:
    step = row_max_bits.umin(float_bits(SCALE_MAX)).bitcast("float")
    channel = widen_bfloat16(round_to_bfloat16(step)) / E4M3_MAX
    floored = channel.bitcast("i32").umax(float_bits(CHANNEL_SCALE_MIN)).bitcast("float")
    return floored * TABLE_HEADROOM
