"""The reference functions of `moequant.formats` once more, as functions on vectors.

Every kernel takes the same parameters and returns the largest magnitude of the weights, as the bits
of the source dtype without their sign: NaN and Inf are those that reach `Source.infinity`. What it
has written by then is of no use.

Where these differ from the reference in more than the order of independent operations:

* products with the reciprocal of a power of two replace quotients: the reciprocal is a normal
  float32, so both are the same real number, rounded once;
* so do products with other reciprocals where the few bits of a weight rule out another code;
* signs are put aside: rounding to nearest is symmetric, and so are quotients by positive numbers;
* magnitudes are compared as unsigned integers, whose order is that of the floats they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats.base import WEIGHTED
from moequant.formats.e8m0 import EXPONENTS, ROUND_UP_BITS
from moequant.formats.elements import (
    E2M1_MAX,
    E4M3_FLOAT32_MAX,
    E4M3_MAX,
    E4M3_SMALLEST,
    FLOAT32_TINY,
    INT4_MAX,
    INT4_MIN,
)
from moequant.formats.fp8_block import SEARCH_FACTORS as FP8_FACTORS
from moequant.formats.nvfp4 import SEARCH_STEPS, WEIGHTED_STEPS
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
from moequant.native_code import UnavailableError
from moequant.native_code.vectors import F32, I32, I64, Type
from moequant.quantizers import e2m1
from moequant.quantizers.elements import (
    E2M1,
    E4M3,
    encode_int4,
    encode_near_int4,
    float_bits,
    group_sum,
    join_nibbles,
    magnitude,
    pack_nibbles,
    round_int4,
    round_to_bfloat16,
    sign_bit,
    widen_bfloat16,
)
from moequant.quantizers.operands import new_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from moequant.formats import Format
    from moequant.native_code.vectors import Function, Value
    from moequant.quantizers.elements import Source

    _Kernel = Callable[[Format, Source, Mapping[str, str]], Function]

_EXPONENT = 0xFF << 23
_ONE_E4M3 = 0x38
_STRIP = 64
"""Weights that are encoded at a time: of 16, 32, 64 and 128 the fastest."""
_TILE = 128
"""Weights that are encoded at a time under a FP32 scale."""
_LINE = 32
"""Weights of two bytes in a line of the cache."""
_GROUPS = 16
"""Groups whose scales are computed at a time: a vector of them."""
_PAIRED = 32
"""Weights that are encoded at a time as pairs of even and odd columns."""
_ROWS = 16
"""Rows of w4a8 whose scales are computed before their codes: few enough to stay in the cache, and
enough for a processor not to wait for each row's scale; also how far ahead weights are fetched."""


_MINIFLOATS = {"e2m1": E2M1, "e4m3": E4M3}
"""Of the elements that `_grouped` encodes."""


def amax(source: Source) -> Function:
    """The largest magnitude alone."""
    f = new_kernel()
    largest = f.variable(f.constant(Type(source.element, 2 * _STRIP), 0))
    rest = f.variable(f.constant(Type(source.element, source.least_lanes), 0))
    w, count = f.parameter("w"), f.parameter("rows") * f.parameter("columns")
    for lanes, loop in f.strips(f.constant(I64, 0), count, 2 * _STRIP, source.least_lanes):
        with loop as at:
            found = largest if lanes > source.least_lanes else rest
            found.set(found.get().umax(source.magnitude(source.load(f, w, at, lanes))))
    f.give(largest.get().reduce("umax").umax(rest.get().reduce("umax")).to("i32"))
    return f


def fp8_scaled(format: Format, source: Source, options: Mapping[str, str]) -> Function:
    """E4M3 with a FP32 scale for blocks of rows and columns, of whole rows, or a given one."""
    rule = options.get("scale", "float32")
    weighted = options.get("search") == WEIGHTED
    block_rows, block_columns = format.block
    f = new_kernel()
    rows, columns = f.parameter("rows"), f.parameter("columns")
    zero = f.constant(I64, 0)
    largest = f.variable(f.constant(Type(source.element), 0))
    block_index = f.variable(zero)

    def code(w: Value, scale: Value) -> Value:
        # A search may clip.
        encode = E4M3.encode if weighted else E4M3.encode_clamped
        return encode(scaled(w, scale))

    def codes(stored: Value, scale: Value) -> Value:
        signs = (source.tops(stored) >> 8) & 0x80
        if stored.type.lanes == 1:
            return code(source.float(stored), scale).to("i8") | signs.to("i8")
        # Pairs need no widening, and stay together until they are bytes.
        even, odd = (code(w, scale) for w in source.pairs(stored))
        return ((even | (odd << 16)).bitcast("i16") | signs).to("i8")

    def scaled(w: Value, scale: Value) -> Value:
        held = _clamped(w, E4M3_FLOAT32_MAX)
        if rule == "power_of_two":
            return held * _reciprocal(scale).splat(w.type.lanes)
        return held / scale.splat(w.type.lanes)

    sums = {factor: f.array(F32, _TILE) for factor in FP8_FACTORS[rule]} if weighted else {}

    def least_squares(scale: Value, top: Value, bottom: Value, left: Value, right: Value) -> Value:
        for total in sums.values():
            f.store(f.constant(Type("float", _TILE), 0.0), total, zero)
        with f.loop(top, bottom, 1) as row:
            for lanes, loop in f.strips(left, right, _TILE, source.least_lanes):
                with loop as column:
                    stored = source.load(f, f.parameter("w"), row * columns + column, lanes)
                    x = scaled(source.float(stored), scale)
                    for factor, total in sums.items():
                        off = E4M3.round(x / factor) * factor - x
                        before = f.load(Type("float", lanes), total, column - left)
                        f.store(before + off * off, total, column - left)
        errors = [
            group_sum(
                f.load(Type("float", _TILE), total, zero)
                * f.load(Type("float", _TILE), f.parameter("importance"), left)
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

    with f.loop(zero, rows, block_rows) as top, f.loop(zero, columns, block_columns) as left:
        bottom, right = rows.umin(top + block_rows), columns.umin(left + block_columns)
        strips = (_TILE, source.least_lanes)
        found = {n: f.variable(f.constant(Type(source.element, n), 0)) for n in strips}
        with f.loop(top, bottom, 1) as row:
            start = row * columns
            for lanes, loop in f.strips(left, right, *strips):
                with loop as column:
                    stored = source.load(f, f.parameter("w"), start + column, lanes)
                    found[lanes].set(found[lanes].get().umax(source.magnitude(stored)))
        maxima = [one.get().reduce("umax") for one in found.values()]
        block_max = maxima[0].umax(maxima[1])
        largest.set(largest.get().umax(block_max))
        if format.shares_scale:
            scale = f.parameter("global_scale")
        else:
            scale = _fp8_scale(source.float(block_max).bitcast("i32"), rule)
        if weighted:
            scale = least_squares(scale, top, bottom, left, right)
        f.store(scale, f.parameter("scale"), block_index.get())
        block_index.set(block_index.get() + 1)
        with f.loop(top, bottom, 1) as row:
            start = row * columns
            for lanes, loop in f.strips(left, right, *strips):
                with loop as column:
                    stored = source.load(f, f.parameter("w"), start + column, lanes)
                    # The next block: rows lie too far apart for the processor to see it come.
                    for i in range(0, lanes, _LINE):
                        source.prefetch(f, f.parameter("w"), start + column + (_TILE + i))
                    f.store(codes(stored, scale), f.parameter("qdata"), start + column)
    f.give(largest.get().to("i32"))
    return f


def _fp8_scale(amax_bits: Value, rule: str) -> Value:
    amax = amax_bits.umin(float_bits(E4M3_FLOAT32_MAX))
    scale = (amax.bitcast("float") / E4M3_MAX).bitcast("i32")
    if rule == "power_of_two":
        scale = (scale + 0x7FFFFF) & _EXPONENT
    scale = scale.umax(float_bits(FLOAT32_TINY))
    return amax.function.constant(F32, 1.0).where(amax.equals(0), scale.bitcast("float"))


def _reciprocal(power: Value) -> Value:
    """1 / 2**k, as float32, of 2**k for -126 <= k <= 126."""
    bits = power.bitcast("i32")
    return (power.function.constant(I32, 254 << 23) - bits).bitcast("float")


def e8m0_groups(format: Format, source: Source, options: Mapping[str, str]) -> Function:
    """Elements with an E8M0 scale for groups of columns, found by a rule of `ROUND_UP_BITS`."""
    rule, element = options["scale_rule"], format.element.name
    searched = rule == "mse" or options.get("search") == WEIGHTED
    up = ROUND_UP_BITS[element]["even" if rule == "mse" else rule]
    exponent = EXPONENTS[element]
    f = new_kernel()

    def scale_of(amax: Value) -> Value:
        # The byte of 2**0 is 127, and of a float32's field too.
        byte = ((amax + up) >> 23).smax(exponent) - exponent
        return f.constant(byte.type, 127).where(amax.equals(0), byte)

    def power(byte: Value) -> Value:
        # Byte 0 is 2**-127, which float32 has among its denormals.
        return (byte << 23).umax(float_bits(2.0**-127)).bitcast("float")

    def reciprocal(byte: Value) -> Value:
        return ((f.constant(byte.type, 254) - byte) << 23).bitcast("float")

    def scales(amax: Value) -> tuple[Value, Value]:
        byte = scale_of(amax)
        return byte, power(byte)

    def least_squares(groups: list[Value], byte: Value, importances: list[Value]) -> Value:
        x = [w * r for w, r in zip(groups, _spread(reciprocal(byte), 32), strict=True)]
        half, one = (f.constant(F32, scale).splat(len(groups)) for scale in (0.5, 1.0))
        lower = _squared_errors(x, half, importances) < _squared_errors(x, one, importances)
        return (byte - 1).where(lower & (f.constant(byte.type, 0) < byte), byte)

    return _grouped(
        f,
        source,
        format,
        scale_of=scale_of,
        search=least_squares if searched else None,
        weighted=options.get("search") == WEIGHTED,
        factor=reciprocal,
        scaled=lambda w, factor: w * factor,
        scales=scales if element == "e2m1" else None,
    )


def nvfp4(format: Format, source: Source, options: Mapping[str, str]) -> Function:
    """`moequant.formats.nvfp4`, given the global scale."""
    f = new_kernel()
    g = f.parameter("global_scale")

    def scale_of(amax: Value) -> Value:
        code = E4M3.encode(amax.bitcast("float") / g.splat(amax.type.lanes) / E2M1_MAX).umax(1)
        return f.constant(code.type, _ONE_E4M3).where(amax.equals(0), code)

    def least_squares(groups: list[Value], code: Value, importances: list[Value]) -> Value:
        x = [w / g.splat(16) for w in groups]
        best, least = code, _squared_errors(x, E4M3.decode(code), importances)
        for step in WEIGHTED_STEPS if importances else SEARCH_STEPS:
            near = (code + step).smax(1).umin(126)
            error = _squared_errors(x, E4M3.decode(near), importances)
            better = error < least
            best, least = near.where(better, best), error.where(better, least)
        return best

    def scales(amax: Value) -> tuple[Value, Value]:
        # A product for both quotients: of amax's 8 bits, 6 times a tie of E4M3 becomes the tie,
        # as 1 / 6 is rounded by 2**-25 of it, and no other comes near one.
        x = amax.bitcast("float") * (f.constant(F32, 1 / E2M1_MAX) / g).splat(amax.type.lanes)
        code = f.constant(amax.type, _ONE_E4M3).where(amax.equals(0), E4M3.encode(x).umax(1))
        # Of zeros any other unit does as well.
        rounded = E4M3.round(x).bitcast("i32").umax(float_bits(E4M3_SMALLEST))
        return code, rounded.bitcast("float") * g.splat(amax.type.lanes)

    return _grouped(
        f,
        source,
        format,
        scale_of=scale_of,
        search=least_squares if options["search"] != "none" else None,
        weighted=options["search"] == WEIGHTED,
        factor=lambda code: E4M3.decode(code) * g.splat(code.type.lanes),
        scaled=lambda w, factor: w / factor,
        scales=scales if options["global_scale"] == "power_of_two" else None,
    )


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


def _grouped(
    f: Function,
    source: Source,
    format: Format,
    *,
    scale_of: Callable[[Value], Value],
    search: Callable[[list[Value], Value, list[Value]], Value] | None,
    weighted: bool,
    factor: Callable[[Value], Value],
    scaled: Callable[[Value, Value], Value],
    scales: Callable[[Value], tuple[Value, Value]] | None,
) -> Function:
    """Codes of groups that depend on nothing but themselves, many groups at a time.

    Args:
        f: to be written.
        source: of the weights.
        format: says what codes are, and how many weights share a scale.
        scale_of: bytes of scales, i32, from the bits of the groups' largest magnitudes.
        search: better bytes, from the groups' clamped magnitudes, the bytes, and the importances of
            the groups' columns; if any.
        weighted: whether there are importances.
        factor: from bytes, what magnitudes are scaled by.
        scaled: what is encoded, from clamped magnitudes and the factor of each.
        scales: of weights in BF16, as `e2m1` takes them, if codes are E2M1 and scales have few
            enough bits.
    """
    w, qdata, scale = (f.parameter(name) for name in ("w", "qdata", "scale"))
    group, limit = format.block[1], format.element.float32_max
    minifloat, sign = _MINIFLOATS[format.element.name], format.element.bits - 1

    groups_in_row = f.parameter("columns") // group

    def importances_of(first: Value, count: int) -> list[Value]:
        # What follows the last column is the first again, for groups of the next rows.
        in_row = (first - first // groups_in_row * groups_in_row) * group
        address, numbers = f.parameter("importance"), Type("float", group)
        return [f.load(numbers, address, in_row + i * group) for i in range(count)]

    def encode(first: Value, count: int) -> Value:
        starts = [(first + i) * group for i in range(count)]
        stored = [source.load(f, w, start, group) for start in starts]
        maxima = _maxima([source.magnitude(one) for one in stored])
        byte = scale_of(_clamped(source.float(maxima), limit).bitcast("i32"))
        if search is not None:
            values = [source.float(one) for one in stored]
            importances = importances_of(first, count) if weighted else []
            byte = search([_clamped(one, limit) for one in values], byte, importances)
        f.store(byte.to("i8"), scale, first)
        factors = factor(byte)
        together = min(count, _STRIP // group)
        for i in range(0, count, together):
            own = [lane for lane in range(i, i + together) for _ in range(group)]
            strip = source.float(source.load(f, w, starts[i], len(own)))
            x = scaled(_clamped(strip, limit), factors.pick(own))
            codes = minifloat.encode(x) | sign_bit(strip, sign)
            if format.codes_per_byte == 2:
                f.store(pack_nibbles(codes), qdata, starts[i] // 2)
            else:
                f.store(codes.to("i8"), qdata, starts[i])
        return maxima.reduce("umax")

    largest = f.variable(f.constant(Type(source.element), 0))
    groups = f.parameter("rows") * f.parameter("columns") // group
    first, together = f.constant(I64, 0), _GROUPS
    if scales is not None and search is None and source.dtype == "bfloat16":
        blocks = groups // (e2m1.BLOCK // group)
        largest.set(e2m1.encode_bfloat16(f, blocks, group=group, scales=scales))
        first, together = blocks * (e2m1.BLOCK // group), 1
    for count, loop in f.strips(first, groups, together):
        with loop as at:
            largest.set(largest.get().umax(encode(at, count)))
    f.give(largest.get().to("i32"))
    return f


def _clamped(values: Value, limit: float) -> Value:
    """Magnitudes of float32 values, held to `limit`."""
    return magnitude(values).umin(float_bits(limit)).bitcast("float")


def _maxima(groups: list[Value]) -> Value:
    """The largest lane of each of one group or of _GROUPS, side by side."""
    if len(groups) == 1:
        return groups[0].reduce("umax")
    while groups[0].type.lanes > _GROUPS:
        halves = [group.halves() for group in groups]
        groups = [low.umax(high) for low, high in halves]
    # Neighbours meet, of two groups at a time; each round leaves half as many, twice as full.
    while len(groups) > 1:
        pairs = zip(groups[::2], groups[1::2], strict=True)
        even, odd = range(0, 2 * _GROUPS, 2), range(1, 2 * _GROUPS, 2)
        groups = [a.pick(even, b).umax(a.pick(odd, b)) for a, b in pairs]
    return groups[0]


def _sums(groups: list[Value]) -> Value:
    """The sum of each of one group or of _GROUPS, side by side, added as `group_sum` adds."""
    if len(groups) == 1:
        return group_sum(groups[0])
    while groups[0].type.lanes > _GROUPS:
        halves = [group.halves() for group in groups]
        groups = [low + high for low, high in halves]
    # The halves of each group meet, of two values at a time.
    length = _GROUPS
    while len(groups) > 1:
        pairs = zip(groups[::2], groups[1::2], strict=True)
        firsts = range(0, 2 * _GROUPS, length)
        low = [first + i for first in firsts for i in range(length // 2)]
        high = [lane + length // 2 for lane in low]
        groups = [a.pick(low, b) + a.pick(high, b) for a, b in pairs]
        length //= 2
    return groups[0]


def w4a8(format: Format, source: Source, options: Mapping[str, str]) -> Function:
    """`moequant.formats.w4a8`; `scratch` holds the scales of some rows, as `scratch_count` says."""
    f = new_kernel()
    rows, columns = f.parameter("rows"), f.parameter("columns")
    w, scales = f.parameter("w"), f.parameter("scratch")
    groups = columns // GROUP
    zero = f.constant(I64, 0)
    largest = f.variable(f.constant(Type(source.element), 0))

    weighted = options["search"] == WEIGHTED
    wide = weighted and options["search_range"] == "wide"
    factors = WEIGHTED_FACTORS if wide else SEARCH_FACTORS
    tried = [f.constant(F32, number) for number in factors if options["search"] != "none"]

    def importance_of(group: Value) -> Value | None:
        if not weighted:
            return None
        return f.load(Type("float", GROUP), f.parameter("importance"), group * GROUP)

    def code(x: Value, scale: Value) -> Value:
        if source.dtype == "float32":
            return encode_int4(x / scale.splat(x.type.lanes))
        return encode_near_int4(x * (f.constant(F32, 1.0) / scale).splat(x.type.lanes))

    with f.loop(zero, rows, _ROWS) as top:
        bottom = rows.umin(top + _ROWS)
        first = top * groups
        with f.loop(top, bottom, 1) as row:
            row_max = f.variable(f.constant(I32, 0))
            start = row * groups
            with f.loop(start, start + groups, 1) as index:
                stored = source.load(f, w, index * GROUP, GROUP)
                high, low = source.extremes(stored)
                largest.set(largest.get().umax(high).umax(low))
                step = _step(source, high, low)
                if tried:
                    importance = importance_of(index - start)
                    step = step * _best(source.float(stored), step, tried, tried, importance)
                row_max.set(row_max.get().umax(step.bitcast("i32")))
                f.store(step, scales, index - first)
            row_scale = _row_scale(row_max.get())
            # Goes beyond the row's end, where the next row puts its steps after that.
            together = 1 if wide else _GROUPS
            with f.loop(start, start + groups, together) as index:
                step = f.load(Type("float", together), scales, index - first)
                group_code = _group_code(step, row_scale)
                scale = _scale_of_code(group_code, row_scale)
                if wide:
                    stored = source.load(f, w, index * GROUP, GROUP)
                    near = [scale]
                    for more in NEAR_STEPS:
                        beside = (group_code + more).smax(1).umin(LARGEST_CODE)
                        near.append(_scale_of_code(beside, row_scale))
                    ratios = [one / _unit(step) for one in near]
                    importance = importance_of(index - start)
                    best = _best(source.float(stored), step, ratios, near, importance)
                    # The row's scales follow from its largest.
                    scale = scale.where(step.bitcast("i32").equals(row_max.get()), best)
                f.store(scale, scales, index - first)
        with f.loop(first, bottom * groups, 1) as index:
            scale = f.load(F32, scales, index - first)
            f.store(round_to_bfloat16(scale), f.parameter("scale"), index)
            for i in range(0, GROUP, _PAIRED):
                at = index * GROUP + i
                # Or the search for extremes, which has little to do, would wait for memory.
                source.prefetch(f, w, at + columns * _ROWS)
                weights = source.pairs(source.load(f, w, at, _PAIRED))
                even, odd = (code(x, scale) for x in weights)
                f.store(join_nibbles(even, odd), f.parameter("qdata"), at // 2)
    f.give(largest.get().to("i32"))
    return f


def scratch_count(format: Format, groups: int) -> int:
    """Numbers of float32 a kernel has to be given as `scratch`, for so many groups in a row."""
    return _ROWS * groups + _GROUPS - 1 if format.element.name == "int4" else 0


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


def padded_importance(format: Format, importance: Tensor) -> Tensor:
    """The importances of a weight's columns [K] as kernels read them, followed by padding.

    Groups that are searched together may begin in one row and end in a later one; blocks of FP8 may
    be ragged, and what counts there is 0.
    """
    if format.element.name == "e2m1" and len(importance):
        more = (_GROUPS - 1) * format.block[1]
        times = 1 + -(-more // len(importance))
        return importance.repeat(times)[: len(importance) + more]
    return torch.nn.functional.pad(importance, (0, -len(importance) % _TILE))


KERNELS: dict[tuple[str, torch.dtype], _Kernel] = {
    ("e4m3", torch.float32): fp8_scaled,
    ("e4m3", torch.float8_e8m0fnu): e8m0_groups,
    ("e2m1", torch.float8_e8m0fnu): e8m0_groups,
    ("e2m1", torch.float8_e4m3fn): nvfp4,
    ("int4", torch.bfloat16): w4a8,
}
"""By element and dtype of the scale."""


def quantizing_kernel(format: Format, source: Source, options: Mapping[str, str]) -> Function:
    """A function that does what `format.quantize` does, to be compiled.

    Raises:
        UnavailableError: nothing here knows such elements and scales.
    """
    kernel = KERNELS.get((format.element.name, format.scale_dtype))
    if kernel is None:
        raise UnavailableError(f"there is no native kernel for {format.name}")
    return kernel(format, source, options)
