"""Kernels that decode quantized weights, and that compute requantization errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.formats.squares import CHUNK, LANES
from moequant.native_code.vectors import F64, I32, I64, Type
from moequant.quantizers.elements import group_sum, round_to_bfloat16
from moequant.quantizers.operands import new_kernel

if TYPE_CHECKING:
    from moequant.native_code.vectors import Function, Value
    from moequant.quantizers.elements import Source

_STRIP = 64


def decode(source: Source, dtype: str) -> Function:
    """Write the numbers of `w` to `qdata`, as float32 or rounded to bfloat16.

    The kernel returns the bits of the largest magnitude as float32; for NaN and Inf, any number not
    less than the bits of Inf.
    """
    f = new_kernel()
    lanes = (_STRIP, source.least_lanes)
    largest = [f.variable(f.constant(Type(source.element, n), 0)) for n in lanes]
    count = f.parameter("rows") * f.parameter("columns")
    strips = f.strips(f.constant(I64, 0), count, *lanes)
    for found, (width, loop) in zip(largest, strips, strict=True):
        with loop as at:
            stored = source.load(f, f.parameter("w"), at, width)
            found.set(found.get().umax(source.magnitude(stored)))
            number = source.float(stored)
            written = number if dtype == "float32" else round_to_bfloat16(number)
            f.store(written, f.parameter("qdata"), at)
    maxima = [found.get().reduce("umax") for found in largest]
    f.give(maxima[0].umax(maxima[1]))
    return f


def compare(before: Source, after: Source) -> Function:
    """Write `moequant.formats.signal_and_noise` of `w` and `qdata` to `scratch`, as float64.

    The number of elements is a multiple of LANES. The kernel returns 0.
    """
    f = new_kernel()
    zero, count = f.constant(I64, 0), f.parameter("rows") * f.parameter("columns")
    sums = [f.variable(f.constant(F64, 0.0)) for _ in range(2)]
    with f.loop(zero, count, CHUNK) as start:
        parts = [f.variable(f.constant(Type("double", LANES), 0.0)) for _ in sums]
        with f.loop(start, count.umin(start + CHUNK), LANES) as at:
            x = before.float(before.load(f, f.parameter("w"), at, LANES))
            y = after.float(after.load(f, f.parameter("qdata"), at, LANES))
            for part, numbers in zip(parts, (x, x - y), strict=True):
                part.set(part.get() + _square(numbers))
        for total, part in zip(sums, parts, strict=True):
            total.set(total.get() + group_sum(part.get()))
    for i, total in enumerate(sums):
        f.store(total.get(), f.parameter("scratch"), f.constant(I64, i))
    f.give(f.constant(I32, 0))
    return f


def _square(numbers: Value) -> Value:
    """Squares of float32 in float64, which are exact and in range."""
    wide = numbers.to("double")
    return wide * wide
