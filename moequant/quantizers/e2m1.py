"""E2M1 codes of BF16 weights by comparing 16-bit integers, without a quotient for every weight.

The magnitudes of BF16 are in the order of their bits as integers. So a group's scale gives seven
limits, one for each code above 0, and the code of a weight is how many of them it exceeds. Weights
are turned so that each lane stays with one group: limits are then computed for many groups at once
and compared with all weights of these groups.

This is exact if `unit`, the weight that E2M1's 1 represents, has at most 4 significant bits:

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
from moequant.native_code.vectors import I64, Type
from moequant.quantizers.elements import float_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moequant.native_code.vectors import Function, Value

_EDGES = tuple((low + high) / 2 for low, high in pairwise((0, 0.5, 1, 1.5, 2, 3, 4, 6)))
_ROW = 32
"""Weights in 512 bits: two runs of 16, each a group or half of one."""
BLOCK = 8 * _ROW
"""Weights that are turned together: 16 runs of 8 pairs make 8 columns of 16 pairs."""
_ROW_TYPE = Type("i16", _ROW)
_RUNS_TYPE = Type("i32", 16)
_RUNS = tuple(8 * (block // 2) + 2 * row + block % 2 for block in range(4) for row in range(4))
"""The run that each lane of a column is of."""
_LANES = tuple(_RUNS.index(run) for run in range(16))
"""The lane of each run."""


def encode_bfloat16(
    f: Function,
    blocks: Value,
    *,
    group: int,
    scales: Callable[[Value], tuple[Value, Value]],
) -> Value:
    """Write the scales and the codes of the first `blocks` times BLOCK weights of `w`.

    A turn of the loop turns one block, scales the one before it and encodes the one before that:
    no part waits for another, as each would for its own block's. Turns at either end do some block
    early or again, which later turns, or the same numbers, overwrite.

    Args:
        f: to be written.
        blocks: how many.
        group: weights that share a scale, 16 or 32.
        scales: from the bits of groups' largest magnitudes as float32 the bytes of their scales,
            i32, and what a code of value 1 represents: float32 of at most 4 significant bits.

    Returns:
        The bits of the largest magnitude, i16; of NaN and Inf too.
    """
    turned = _TurnedBlocks(f)
    none = f.constant(_RUNS_TYPE, 0)
    maxima, largest = f.variable(none), f.variable(none)
    limits = [f.variable(f.constant(_ROW_TYPE, 0)) for _ in _EDGES]
    with f.loop(f.constant(I64, 0), blocks + (blocks.umin(1) << 1), 1) as turn:
        encoded = turn - turn.umin(2)
        scaled = (turn - turn.umin(1)).umin(blocks - 1)
        signs, magnitudes = turned.load(turn & 1)
        own = [limit.get() for limit in limits]

        amax = maxima.get()
        largest.set(largest.get().umax(amax))
        byte, unit = scales(amax.umin(float_bits(E2M1_FLOAT32_MAX)))
        lanes = _LANES[:: group // 16]
        f.store(byte.to("i8").pick(lanes), f.parameter("scale"), scaled * (BLOCK // group))
        for limit, bits in zip(limits, _limits(unit), strict=True):
            limit.set(bits)

        columns = _columns(f, turn.umin(blocks - 1) * BLOCK)
        maxima.set(_group_maxima(turned.store(columns, turn & 1), group))

        _store_codes(f, encoded * BLOCK, _codes(signs, magnitudes, own))
    return (largest.get().reduce("umax") >> 16).to("i16")


class _TurnedBlocks:
    """Columns of two blocks, with separate signs."""

    def __init__(self, f: Function) -> None:
        self._f = f
        self._signs = f.array(_ROW_TYPE, 2 * 4)
        self._magnitudes = f.array(_ROW_TYPE, 2 * 8)

    def store(self, columns: Sequence[Value], place: Value) -> list[Value]:
        """Keep the columns of a block in one of two places; their magnitudes."""
        for i in range(4):
            signs = _placed_signs(*columns[2 * i : 2 * i + 2])
            self._f.store(signs, self._signs, (place * 4 + i) * _ROW)
        magnitudes = [column & 0x7FFF for column in columns]
        for i, column in enumerate(magnitudes):
            self._f.store(column, self._magnitudes, (place * 8 + i) * _ROW)
        return magnitudes

    def load(self, place: Value) -> tuple[list[Value], list[Value]]:
        """The placed signs of pairs of columns, and the magnitudes of columns."""
        load = self._f.load
        signs = [load(_ROW_TYPE, self._signs, (place * 4 + i) * _ROW) for i in range(4)]
        return signs, [load(_ROW_TYPE, self._magnitudes, (place * 8 + i) * _ROW) for i in range(8)]


def _columns(f: Function, at: Value) -> list[Value]:
    """For each i pair i of every run of a block, in the order of _RUNS: <32 x i16>."""
    rows = [
        f.load(Type("i16", _ROW), f.parameter("w"), at + i).bitcast("i32")
        for i in range(0, BLOCK, _ROW)
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


def _group_maxima(magnitudes: Sequence[Value], group: int) -> Value:
    """Each group's largest magnitude as the bits of a float32, in all lanes of its runs."""
    largest = magnitudes[0]
    for column in magnitudes[1:]:
        largest = largest.umax(column)
    pairs = largest.bitcast("i32")
    maxima = (pairs << 16).umax(pairs & -0x10000)
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


def _placed(f: Function, code: int, column: int) -> Value:
    """A code where the nibbles of columns 0 and 1 are put: <32 x i16>.

    Column 0 in one byte, column 1 in the next, even weights in the lower nibble, odd ones in the
    upper: so the halves of a pair, put over each other, are two bytes of codes.
    """
    return _of_pairs(f, code << (8 * column), code << (8 * column + 4))


def _placed_signs(*columns: Value) -> Value:
    """Bit 3 of the codes of two columns."""
    f = columns[0].function
    # Of even weights from bit 15 to 3 and 11, of odd ones to 7 and 15.
    one, two = (
        (column >> _of_pairs(f, 12 - 8 * i, 8 - 8 * i)) & _placed(f, 8, i)
        for i, column in enumerate(columns)
    )
    return one | two


def _of_pairs(f: Function, even: int, odd: int) -> Value:
    """A number for the even and one for the odd weights: <32 x i16>."""
    return f.constant(_RUNS_TYPE, even | odd << 16).bitcast("i16")


def _codes(
    signs: Sequence[Value], magnitudes: Sequence[Value], limits: Sequence[Value]
) -> list[Value]:
    """The codes of pairs of columns, as `_placed` says, with the signs given so."""
    one, two, three, four, five, six, seven = limits
    codes = []
    for i, code in enumerate(signs):
        for column, magnitude in enumerate(magnitudes[2 * i : 2 * i + 2]):
            upper = four < magnitude
            middle = six.where(upper, two) < magnitude
            odd = seven.where(upper, three).where(middle, five.where(upper, one)) < magnitude
            for part, condition in ((4, upper), (2, middle), (1, odd)):
                code = (code + _placed(code.function, part, column)).where(condition, code)
        codes.append(code)
    return codes


def _store_codes(f: Function, at: Value, codes: Sequence[Value]) -> None:
    """Write the codes of a block as nibbles in the order of the weights."""
    words = _joined(*codes[:2]), _joined(*codes[2:])
    for half in (_LANES[:8], _LANES[8:]):
        lanes = [lane + 16 * word for lane in half for word in range(2)]
        place = (at + 16 * _RUNS[half[0]]) // 2
        f.store(words[0].pick(lanes, words[1]).bitcast("i8"), f.parameter("qdata"), place)


def _joined(one: Value, other: Value) -> Value:
    """Four bytes of each run, two from the halves of a pair in `one`, two from `other`."""
    straight = [lane + _ROW * (lane % 2) for lane in range(_ROW)]
    crossed = [(lane ^ 1) + _ROW * (lane % 2) for lane in range(_ROW)]
    return (one.pick(straight, other) | one.pick(crossed, other)).bitcast("i32")
