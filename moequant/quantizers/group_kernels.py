"""Elements with a scale of one byte for groups of columns: an E8M0 scale, or E4M3 in NVFP4."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from moequant.formats.base import WEIGHTED
from moequant.formats.e8m0 import EXPONENTS, ROUND_UP_BITS
from moequant.formats.elements import E2M1_MAX, E4M3_SMALLEST
from moequant.formats.nvfp4 import SEARCH_STEPS, WEIGHTED_STEPS
from moequant.native_code.vectors import F32, I64, Type
from moequant.quantizers import e2m1
from moequant.quantizers.elements import (
    E2M1,
    E4M3,
    clamped,
    float_bits,
    group_sum,
    pack_nibbles,
    sign_bit,
)
from moequant.quantizers.native_kernel import NativeKernel
from moequant.quantizers.operands import new_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.formats import Format
    from moequant.native_code.vectors import Function, Value
    from moequant.quantizers.elements import Source

GROUPS = 16
"""Groups whose scales are computed at a time: a vector of them."""
_STRIP = 64
"""Weights that are encoded at a time: of 16, 32, 64 and 128 the fastest."""
_ONE_E4M3 = 0x38
_MINIFLOATS = {"e2m1": E2M1, "e4m3": E4M3}
"""The elements that are encoded."""


class _GroupKernel(NativeKernel):
    """Codes of groups that depend on nothing but themselves, many groups at a time."""

    _searches: bool
    """Whether `_search` finds scales."""
    _few_bits: bool
    """Whether codes are E2M1 and `_byte_and_unit` gives scales of few enough bits for `e2m1`."""

    def __init__(self, format: Format, source: Source, options: Mapping[str, str]) -> None:
        self._format, self._source = format, source
        self._weighted = options.get("search") == WEIGHTED
        self._group, self._limit = format.block[1], format.element.float32_max
        self._f = new_kernel()
        self._groups_in_row = self._f.parameter("columns") // self._group

    @abstractmethod
    def _scale_of(self, amax: Value) -> Value:
        """Bytes of scales, i32, from the bits of the groups' largest magnitudes."""

    @abstractmethod
    def _search(self, groups: list[Value], byte: Value, importances: list[Value]) -> Value:
        """Better bytes.

        Args:
            groups: their clamped magnitudes.
            byte: the bytes.
            importances: of the groups' columns; empty for equal ones.
        """

    @abstractmethod
    def _factor(self, byte: Value) -> Value:
        """From bytes, what magnitudes are scaled by."""

    @abstractmethod
    def _scaled(self, w: Value, factor: Value) -> Value:
        """What is encoded, from clamped magnitudes and the factor of each."""

    @abstractmethod
    def _byte_and_unit(self, amax: Value) -> tuple[Value, Value]:
        """The `scales` of `e2m1.encode_bfloat16`."""

    def write(self) -> Function:
        """See `NativeKernel`."""
        f, source, group = self._f, self._source, self._group
        largest = f.variable(f.constant(Type(source.element), 0))
        groups = f.parameter("rows") * f.parameter("columns") // group
        first, together = f.constant(I64, 0), GROUPS
        if self._few_bits and not self._searches and source.dtype == "bfloat16":
            blocks = groups // (e2m1.BLOCK // group)
            found = e2m1.encode_bfloat16(f, blocks, group=group, scales=self._byte_and_unit)
            largest.set(found)
            first, together = blocks * (e2m1.BLOCK // group), 1
        for count, loop in f.strips(first, groups, together):
            with loop as at:
                largest.set(largest.get().umax(self._encode(at, count)))
        f.give(largest.get().to("i32"))
        return f

    @staticmethod
    def padded_importance(importance: Tensor, group: int) -> Tensor:
        """See `NativeKernel`: followed by itself, for groups that begin in later rows."""
        if not len(importance):
            return importance
        more = (GROUPS - 1) * group
        times = 1 + -(-more // len(importance))
        return importance.repeat(times)[: len(importance) + more]

    def _encode(self, first: Value, count: int) -> Value:
        """Write scales and codes of `count` groups; the bits of their largest magnitude."""
        f, source = self._f, self._source
        starts = [(first + i) * self._group for i in range(count)]
        stored = [source.load(f, f.parameter("w"), start, self._group) for start in starts]
        maxima = _maxima([source.magnitude(one) for one in stored])
        byte = self._scale_of(clamped(source.float(maxima), self._limit).bitcast("i32"))
        if self._searches:
            values = [source.float(one) for one in stored]
            importances = self._importances(first, count) if self._weighted else []
            byte = self._search([clamped(one, self._limit) for one in values], byte, importances)
        f.store(byte.to("i8"), f.parameter("scale"), first)
        self._store_codes(starts, self._factor(byte))
        return maxima.reduce("umax")

    def _importances(self, first: Value, count: int) -> list[Value]:
        """Those of the columns of each group."""
        f, group = self._f, self._group
        # What follows the last column is the first again, for groups of the next rows.
        in_row = (first - first // self._groups_in_row * self._groups_in_row) * group
        address, numbers = f.parameter("importance"), Type("float", group)
        return [f.load(numbers, address, in_row + i * group) for i in range(count)]

    def _store_codes(self, starts: list[Value], factors: Value) -> None:
        """Codes of groups that begin at `starts`, scaled by a factor each."""
        f, format, qdata = self._f, self._format, self._f.parameter("qdata")
        minifloat, sign = _MINIFLOATS[format.element.name], format.element.bits - 1
        together = min(len(starts), _STRIP // self._group)
        for i in range(0, len(starts), together):
            own = [lane for lane in range(i, i + together) for _ in range(self._group)]
            strip = self._source.float(self._source.load(f, f.parameter("w"), starts[i], len(own)))
            x = self._scaled(clamped(strip, self._limit), factors.pick(own))
            codes = minifloat.encode(x) | sign_bit(strip, sign)
            if format.codes_per_byte == 2:
                f.store(pack_nibbles(codes), qdata, starts[i] // 2)
            else:
                f.store(codes.to("i8"), qdata, starts[i])


class E8m0Kernel(_GroupKernel):
    """Elements with an E8M0 scale, found by a rule of `ROUND_UP_BITS`."""

    def __init__(self, format: Format, source: Source, options: Mapping[str, str]) -> None:
        super().__init__(format, source, options)
        rule, element = options["scale_rule"], format.element.name
        self._searches = rule == "mse" or self._weighted
        self._few_bits = element == "e2m1"
        self._up = ROUND_UP_BITS[element]["even" if rule == "mse" else rule]
        self._exponent = EXPONENTS[element]

    def _scale_of(self, amax: Value) -> Value:
        # The byte of 2**0 is 127, and of a float32's field too.
        byte = ((amax + self._up) >> 23).smax(self._exponent) - self._exponent
        return self._f.constant(byte.type, 127).where(amax.equals(0), byte)

    def _search(self, groups: list[Value], byte: Value, importances: list[Value]) -> Value:
        f = self._f
        x = [w * r for w, r in zip(groups, _spread(self._factor(byte), 32), strict=True)]
        half, one = (f.constant(F32, scale).splat(len(groups)) for scale in (0.5, 1.0))
        lower = _squared_errors(x, half, importances) < _squared_errors(x, one, importances)
        return (byte - 1).where(lower & (f.constant(byte.type, 0) < byte), byte)

    def _factor(self, byte: Value) -> Value:
        """The reciprocals of the scales."""
        return ((self._f.constant(byte.type, 254) - byte) << 23).bitcast("float")

    def _scaled(self, w: Value, factor: Value) -> Value:
        return w * factor

    def _byte_and_unit(self, amax: Value) -> tuple[Value, Value]:
        byte = self._scale_of(amax)
        # Byte 0 is 2**-127, which float32 has among its denormals.
        return byte, (byte << 23).umax(float_bits(2.0**-127)).bitcast("float")


class Nvfp4Kernel(_GroupKernel):
    """`moequant.formats.nvfp4`, given the global scale."""

    def __init__(self, format: Format, source: Source, options: Mapping[str, str]) -> None:
        super().__init__(format, source, options)
        self._searches = options["search"] != "none"
        self._few_bits = options["global_scale"] == "power_of_two"
        self._global_scale = self._f.parameter("global_scale")

    def _scale_of(self, amax: Value) -> Value:
        x = amax.bitcast("float") / self._global_scale.splat(amax.type.lanes)
        code = E4M3.encode(x / E2M1_MAX).umax(1)
        return self._f.constant(code.type, _ONE_E4M3).where(amax.equals(0), code)

    def _search(self, groups: list[Value], byte: Value, importances: list[Value]) -> Value:
        x = [w / self._global_scale.splat(16) for w in groups]
        best, least = byte, _squared_errors(x, E4M3.decode(byte), importances)
        for step in WEIGHTED_STEPS if importances else SEARCH_STEPS:
            near = (byte + step).smax(1).umin(126)
            error = _squared_errors(x, E4M3.decode(near), importances)
            better = error < least
            best, least = near.where(better, best), error.where(better, least)
        return best

    def _factor(self, byte: Value) -> Value:
        return E4M3.decode(byte) * self._global_scale.splat(byte.type.lanes)

    def _scaled(self, w: Value, factor: Value) -> Value:
        return w / factor

    def _byte_and_unit(self, amax: Value) -> tuple[Value, Value]:
        f, g, lanes = self._f, self._global_scale, amax.type.lanes
        # A product for both quotients: of amax's 8 bits, 6 times a tie of E4M3 becomes the tie,
        # as 1 / 6 is rounded by 2**-25 of it, and no other comes near one.
        x = amax.bitcast("float") * (f.constant(F32, 1 / E2M1_MAX) / g).splat(lanes)
        code = f.constant(amax.type, _ONE_E4M3).where(amax.equals(0), E4M3.encode(x).umax(1))
        # Of zeros any other unit does as well.
        rounded = E4M3.round(x).bitcast("i32").umax(float_bits(E4M3_SMALLEST))
        return code, rounded.bitcast("float") * g.splat(lanes)


def _squared_errors(groups: list[Value], scales: Value, importances: list[Value]) -> Value:
    """For each group of magnitudes the squared error under its scale, side by side.

    `importances` are those of each group's columns; empty for equal ones.
    """
    lanes = groups[0].type.lanes
    off = [
        E2M1.round(x / scale) * scale - x
        for x, scale in zip(groups, _spread(scales, lanes), strict=True)
    ]
    squares = [one * one for one in off]
    if importances:
        squares = [one * weight for one, weight in zip(squares, importances, strict=True)]
    return _sums(squares)


def _spread(numbers: Value, lanes: int) -> list[Value]:
    """Each number in all lanes of a value of its own."""
    return [numbers.pick([i] * lanes) for i in range(numbers.type.lanes)]


def _maxima(groups: list[Value]) -> Value:
    """The largest lane of each of one group or of GROUPS, side by side."""
    if len(groups) == 1:
        return groups[0].reduce("umax")
    while groups[0].type.lanes > GROUPS:
        halves = [group.halves() for group in groups]
        groups = [low.umax(high) for low, high in halves]
    # Neighbours meet, of two groups at a time; each round leaves half as many, twice as full.
    while len(groups) > 1:
        pairs = zip(groups[::2], groups[1::2], strict=True)
        even, odd = range(0, 2 * GROUPS, 2), range(1, 2 * GROUPS, 2)
        groups = [a.pick(even, b).umax(a.pick(odd, b)) for a, b in pairs]
    return groups[0]


def _sums(groups: list[Value]) -> Value:
    """The sum of each of one group or of GROUPS, side by side, added as `group_sum` adds."""
    if len(groups) == 1:
        return group_sum(groups[0])
    while groups[0].type.lanes > GROUPS:
        halves = [group.halves() for group in groups]
        groups = [low + high for low, high in halves]
    # The halves of each group meet, of two values at a time.
    length = GROUPS
    while len(groups) > 1:
        pairs = zip(groups[::2], groups[1::2], strict=True)
        firsts = range(0, 2 * GROUPS, length)
        low = [first + i for first in firsts for i in range(length // 2)]
        high = [lane + length // 2 for lane in low]
        groups = [a.pick(low, b) + a.pick(high, b) for a, b in pairs]
        length //= 2
    return groups[0]
