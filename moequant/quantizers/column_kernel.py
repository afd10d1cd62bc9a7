"""Round a block of columns as `column_rounding.round_columns_in_torch` does, as a kernel.

The reference adds a column's error to all columns that follow. Here a column, when its turn comes,
adds the errors of those before it, in the same order, from a few lanes that stay in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.native_code.vectors import F64, I32, I64, Type
from moequant.quantizers.elements import (
    E2M1,
    E4M3,
    decode_e2m1,
    decode_e4m3,
    decode_int4,
    encode_int4,
    sign_bit,
)
from moequant.quantizers.operands import new_kernel

if TYPE_CHECKING:
    from moequant.native_code.vectors import Function, Value
    from moequant.quantizers.elements import Minifloat

MOST_COLUMNS = 64
"""Most columns of a block."""
_LANES = 16
"""Rows at a time: enough for a processor not to wait for each sum."""


def round_columns(element: str) -> Function:
    """The kernel for an element, by its name.

    Of PARAMETERS, `rows` is the number of columns B of the weight, `columns` that of its rows N:
    all matrices are transposed. `w` is target [B, N] float64, `w_scale` the scales [B, N] float64,
    `qdata` the codes [B, N] uint8, `scale` the errors [B, N] float64, and `scratch` the feedback
    [B, B] float64.
    """
    f = new_kernel()
    zero = f.constant(I64, 0)
    B, N = f.parameter("rows"), f.parameter("columns")
    done = f.array(F64, MOST_COLUMNS * _LANES)
    for lanes, loop in f.strips(zero, N, _LANES):
        with loop as row, f.loop(zero, B, 1) as column:
            at, wide = column * N + row, Type("double", lanes)
            total = f.variable(f.load(wide, f.parameter("w"), at))
            with f.loop(zero, column, 1) as before:
                factor = f.load(F64, f.parameter("scratch"), column * B + before)
                error = f.load(wide, done, before * _LANES)
                total.set(total.get() + factor.splat(lanes) * error)
            scale = f.load(wide, f.parameter("w_scale"), at)
            code = _encode(element, (total.get() / scale).to("float"))
            f.store(code.to("i8"), f.parameter("qdata"), at)
            decoded = _decode(element, code).to("double") * scale
            error = f.load(wide, f.parameter("scale"), at) - decoded
            f.store(error, f.parameter("scale"), at)
            f.store(error, done, column * _LANES)
    f.give(f.constant(I32, 0))
    return f


def _encode(element: str, x: Value) -> Value:
    if element == "int4":
        return encode_int4(x)
    minifloat, sign = _MINIFLOATS[element]
    return minifloat.encode((x.bitcast("i32") & 0x7FFFFFFF).bitcast("float")) | sign_bit(x, sign)


def _decode(element: str, code: Value) -> Value:
    return {"e2m1": decode_e2m1, "e4m3": decode_e4m3, "int4": decode_int4}[element](code)


_MINIFLOATS: dict[str, tuple[Minifloat, int]] = {"e2m1": (E2M1, 3), "e4m3": (E4M3, 7)}
"""Element and the place of its sign."""
