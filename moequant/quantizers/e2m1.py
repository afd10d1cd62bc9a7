"""E2M1 codes of BF16 weights by comparing 16-bit integers, without a quotient for every weight.

The magnitudes of BF16 are in the order of their bits as integers. So a group's scale gives seven
limits, one for each code above 0, and the code of a weight is how many of them it exceeds. Weights
are turned so that each lane stays with one group: limits are then computed for many groups at once
and compared with all weights of these groups.

This is exact if `unit`, the weight that E2M1's 1 stands for, has at most 4 significant bits:

* The edges halfway between neighbouring values of E2M1 have at most 3 significant bits, so
  edge * unit has at most 7 and is an exact float32, among the denormals too if unit is a multiple
  of 2**-147. A weight has 8: it equals this product or is off by 2**-8 of it or more, and rounding
  weight / unit to float32 cannot hide that.
* Weights beyond E2M1_FLOAT32_MAX, which the reference clamps, get code 7 as they are: their group's
  unit is 17/16 * 2**125 at most, so the last edge, 5 * unit, lies below the clamp.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from moequant.formats.elements import E2M1_FLOAT32_MAX
from moequant.quantizers.elements import float_bits
from moequant.quantizers.vectors import Type

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moequant.quantizers.vectors import Function, Value

_EDGES = tuple((low + high) / 2 for low, high in pairwise((0, 0.5, 1, 1.5, 2, 3, 4, 6)))
_ROW = 32
"""Weights in 512 bits: two runs of 16, each a group or half of one."""
_BLOCK = 8 * _ROW
"""Weights that are turned together: 16 runs of 8 pairs make 8 columns of 16 pairs."""
WEIGHTS = 2 * _BLOCK
"""Weights that are encoded at a time."""
_RUNS = tuple(8 * (block // 2) + 2 * row + block % 2 for block in range(4) for row in range(4))
"""The run that each lane of a column is of."""
_LANES = tuple(_RUNS.index(run) for run in range(16))
"""The lane of each run."""


def encode_bfloat16(
    f: Function,
    first: Value,
    *,
    group: int,
    scale_of: Callable[[Value], Value],
    unit: Callable[[Value], Value],
) -> Value:
    """Write the scales and the codes of WEIGHTS weights of `w`.

    Args:
        f: to be written.
        first: index of their first group.
        group: weights that share a scale, 16 or 32.
        scale_of: bytes of scales, i32, from the bits of the groups' largest magnitudes as float32.
        unit: from bytes, what a code of value 1 stands for: float32 of at most 4 significant bits.

    Returns:
        The bits of the largest magnitude, i16; of NaN and Inf too.
    """
    start = first * group
    lanes = _LANES[:: group // 16]
    largest = f.constant(Type("i32", 16), 0)
    blocks = []
    # All scales before all codes: quotients take long, and the next block's wait for nothing.
    for at in (start, start + _BLOCK):
        columns = _columns(f, at)
        maxima = _group_maxima(columns, group)
        largest = largest.umax(maxima)
        byte = scale_of((maxima << 16).umin(float_bits(E2M1_FLOAT32_MAX)))
        f.store(byte.to("i8").pick(lanes), f.parameter("scale"), at // group)
        blocks.append((at, columns, _limits(unit(byte))))
    for at, columns, limits in blocks:
        _store_codes(f, at, [_codes(column, limits) for column in columns])
    return largest.reduce("umax").to("i16")


def _columns(f: Function, at: Value) -> list[Value]:
    """For each i pair i of every run of a block, in the order of _RUNS: <32 x i16>."""
    rows = [
        f.load(Type("i16", _ROW), f.parameter("w"), at + i).bitcast("i32")
        for i in range(0, _BLOCK, _ROW)
    ]
    halves = _transposed(rows[:4]), _transposed(rows[4:])
    # Parts of four lanes hold in turn the first four and the last four pairs of a run.
    early = [lane + 8 * part for part in range(4) for lane in range(4)]
    late = [lane + 4 for lane in early]
    return [
        one.pick(lanes, other).bitcast("i16")
        for lanes in (early, late)
        for one, other in zip(*halves, strict=True)
    ]


def _transposed(rows: Sequence[Value]) -> list[Value]:
    """Four rows <16 x i32>, each part of four lanes transposed with its like in the others."""
    a, b = _interleaved(rows[0], rows[1], 1)
    c, d = _interleaved(rows[2], rows[3], 1)
    return [*_interleaved(a, c, 2), *_interleaved(b, d, 2)]


def _interleaved(one: Value, other: Value, size: int) -> tuple[Value, Value]:
    """Of each part of four lanes the lower and the upper two, alternately `size` of both values.

    Processors have instructions for that, as parts have 128 bits.
    """
    two = [i + 16 * of + j for i in range(0, 2, size) for of in range(2) for j in range(size)]
    low = [lane + 4 * part for part in range(4) for lane in two]
    return one.pick(low, other), one.pick([lane + 2 for lane in low], other)


def _group_maxima(columns: Sequence[Value], group: int) -> Value:
    """The bits of each group's largest magnitude, in all lanes of its runs: <16 x i32>."""
    largest = columns[0] & 0x7FFF
    for column in columns[1:]:
        largest = largest.umax(column & 0x7FFF)
    pairs = largest.bitcast("i32")
    maxima = (pairs >> 16).umax(pairs & 0xFFFF)
    if group == 32:
        maxima = maxima.umax(maxima.pick([_LANES[run ^ 1] for run in _RUNS]))
    return maxima


def _limits(unit: Value) -> list[Value]:
    """For codes 1 to 7 the bits of the largest magnitude below the code, in pairs: <32 x i16>."""
    limits = []
    for code, edge in enumerate(_EDGES, start=1):
        bits = (unit * edge).bitcast("i32")
        if code % 2 == 0:
            bits = bits - 1  # A tie goes to the even code: what equals the edge is no more below.
        limits.append(((bits & -0x10000) | (bits >> 16)).bitcast("i16"))
    return limits


def _codes(weights: Value, limits: Sequence[Value]) -> Value:
    """Codes, the sign in bit 3, of BF16 weights: <32 x i16>."""
    magnitude = weights & 0x7FFF
    one, two, three, four, five, six, seven = limits
    code = (weights >> 12) & 8
    upper = four < magnitude
    code = (code + 4).where(upper, code)
    middle = six.where(upper, two) < magnitude
    code = (code + 2).where(middle, code)
    odd = seven.where(upper, three).where(middle, five.where(upper, one)) < magnitude
    return (code + 1).where(odd, code)


def _store_codes(f: Function, at: Value, columns: Sequence[Value]) -> None:
    """Write codes in columns of pairs as nibbles in the order of the weights."""
    words = []
    for i in (0, 4):
        # Codes 0 and 2 of a run beside codes 1 and 3, then with those in the gaps.
        early, late = ((columns[j] | (columns[j + 1] << 8)).bitcast("i32") for j in (i, i + 2))
        early, late = early | (early >> 12), late | (late >> 12)
        words.append((early & 0xFFFF) | (late << 16))
    for half in (_LANES[:8], _LANES[8:]):
        lanes = [lane + 16 * word for lane in half for word in range(2)]
        place = (at + 16 * _RUNS[half[0]]) // 2
        f.store(words[0].pick(lanes, words[1]).bitcast("i8"), f.parameter("qdata"), place)
