"""MXFP8: E4M3 weights with one E8M0 scale, a power of two, per 32 columns."""

from __future__ import annotations

from moequant.formats.e8m0 import E8m0Format
from moequant.formats.elements import E4M3


class Mxfp8(E8m0Format):
    """`w = qdata * scale`; option `scale_rule` computes the scale's exponent from amax.

    | rule | exponent | largest code before rounding | relative error, N(0, 0.02) |
    |---|---|---|---|
    | ceil | ceil(log2(amax / 448)) | 448 | 2.66 % |
    | floor | floor(log2(amax)) - 8 | below 512 | 2.93 % |

    "floor" is the conversion of OCP Microscaling Formats v1.0, section 6.3; "ceil" clips nothing.

    Rules: round to nearest even; beyond +-448 saturates; a zero group has scale 1 (byte 127) and
    zero codes; exponents are at least -127, and byte 255, NaN, is never written; -0 stays -0, and
    a negative weight that rounds to zero becomes -0; weights beyond +-1.875 * 2**127 saturate
    there, so that no finite weight decodes to Inf.

    Error: at most half a step of E4M3, times scale, under "ceil"; "floor" clips what lies between
    448 and 512, in units of the scale.

    Every finite MXFP4 weight is quantized to the same numbers: with amax 6 * 2**e the scale is
    2**(e - 6) or, where that is too small, 2**-127, and all numbers of the group are multiples of
    2**(e - 1).
    """

    name = "mxfp8"
    summary = "FP8 E4M3, one power-of-two E8M0 scale per 32 columns, weight only"
    element = E4M3
    ordinary_error = 0.0268
    # OCP's rule, 2**(floor(log2(amax)) - 8); others clip less.
    reach = (-512.0, 512.0)
    options = {"scale_rule": ("ceil", "floor")}  # noqa: RUF012
