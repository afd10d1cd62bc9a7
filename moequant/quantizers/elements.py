"""Element codecs of `moequant.formats.elements` on vectors of a function being written.

Same results by other means: where the reference rounds with `round_`, these add the power of two
at which a float32's last bit is worth one step of the element. The sum is rounded by the
processor, to nearest and ties to even, as `round_` is, and holds the code in its last bits.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from moequant.native_code.vectors import Type

if TYPE_CHECKING:
    from moequant.native_code.vectors import Function, Value

_EXPONENT = 0xFF << 23
_INT4_ROUNDER = 1.5 * 2.0**23


def float_bits(number: float) -> int:
    """The bits of `number` as a float32."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


class Minifloat:
    """A small floating-point element.

    Args:
        exponent: bits of the exponent.
        mantissa: bits after the point.
        least: exponent of the smallest normal number.
        largest: the largest finite number.
    """

    def __init__(self, exponent: int, mantissa: int, least: int, largest: float) -> None:
        self._codes = 1 << (exponent + mantissa)
        self._mantissa = mantissa
        self._least = least
        self._largest = largest

    def encode(self, magnitude: Value) -> Value:
        """Codes, without a sign, of non-negative float32 values: i32 of as many lanes.

        With p the power of two at or below the value, at least that of the smallest normal number,
        a step is p / 2**mantissa and the value makes at most 2 * 2**mantissa of them. Each power
        of two above the least adds 2**mantissa codes.
        """
        return self.encode_clamped(self._clamped(magnitude))

    def encode_clamped(self, magnitude: Value) -> Value:
        """As `encode`, of values that round to no more than the largest."""
        power = self._power(magnitude)
        total = magnitude + self._rounder(power)
        return (total.bitcast("i32") + (power >> (23 - self._mantissa))) & (self._codes - 1)

    def decode(self, code: Value) -> Value:
        """Codes without a sign, i32, to float32; no code of this element is NaN or Inf."""
        steps = code.to("float") * 2.0 ** (self._least - self._mantissa)
        exponent = (self._least + 126) << 23
        normal = ((code << (23 - self._mantissa)) + exponent).bitcast("float")
        return steps.where(code < (1 << self._mantissa), normal)

    def round(self, magnitude: Value) -> Value:
        """The element's value nearest to each non-negative float32 value."""
        clamped = self._clamped(magnitude)
        rounder = self._rounder(self._power(clamped))
        return (clamped + rounder) - rounder

    def _clamped(self, magnitude: Value) -> Value:
        return magnitude.bitcast("i32").umin(float_bits(self._largest)).bitcast("float")

    def _power(self, magnitude: Value) -> Value:
        return (magnitude.bitcast("i32") & _EXPONENT).umax((self._least + 127) << 23)

    def _rounder(self, power: Value) -> Value:
        """A float32 whose last bit is worth a step: 2**23 steps, and a few.

        The few, an even number, cancel what the exponent field of the least power of two leaves in
        the bits of a code.
        """
        few = -((self._least + 127) << self._mantissa) % self._codes
        assert few % 2 == 0, "or ties would go to odd codes"
        return (power + (((23 - self._mantissa) << 23) + few)).bitcast("float")


E2M1 = Minifloat(exponent=2, mantissa=1, least=0, largest=6.0)
E4M3 = Minifloat(exponent=4, mantissa=3, least=-6, largest=448.0)


def decode_e2m1(code: Value) -> Value:
    """E2M1 codes 0..15, i32, to float32."""
    return with_sign(E2M1.decode(code & 7), code >> 3)


def decode_e4m3(code: Value) -> Value:
    """E4M3 codes 0..255, i32, to float32, NaN too."""
    magnitude = code & 0x7F
    number = E4M3.decode(magnitude).bitcast("i32")
    nan = code.function.constant(code.type, float_bits(math.nan))
    return with_sign(nan.where(magnitude.equals(0x7F), number).bitcast("float"), code >> 7)


def decode_e8m0(code: Value) -> Value:
    """E8M0 codes 0..255, i32, to float32, NaN too."""
    constant = code.function.constant
    power = constant(code.type, float_bits(2.0**-127)).where(code.equals(0), code << 23)
    return constant(code.type, float_bits(math.nan)).where(code.equals(255), power).bitcast("float")


def decode_int4(code: Value) -> Value:
    """Two's complement nibbles, i32 0..15, to float32."""
    return (code ^ 8).to("float") - 8.0


def with_sign(magnitude: Value, sign: Value) -> Value:
    """float32 magnitudes made negative where `sign`, i32, is 1 and not 0."""
    return (magnitude.bitcast("i32") | (sign << 31)).bitcast("float")


def round_int4(x: Value) -> Value:
    """float32 to the nearest of -8..7, as float32."""
    return (x.clamp(-8.0, 7.0) + _INT4_ROUNDER) - _INT4_ROUNDER


def encode_int4(x: Value) -> Value:
    """float32 to two's complement nibbles, i32 0..15.

    Held to -8..7 before the rounding, which is the same as after it: both are integers.
    """
    return (x.clamp(-8.0, 7.0) + _INT4_ROUNDER).bitcast("i32") & 0xF


def encode_near_int4(x: Value) -> Value:
    """`encode_int4` of the multiple of 2**-17 nearest to each x.

    So a product of float32 with a reciprocal replaces a quotient by a number of 8 bits, if x has
    11 or less: it is off by 2**-20 at most, the quotients next to a tie by 2**-15 at least.
    """
    # From 64 to 128 float32 has such steps; and positive ones are in the order of their bits.
    bits = (x + 96.0).bitcast("i32")
    near = bits.smax(float_bits(96.0 - 8.0)).umin(float_bits(96.0 + 7.0)).bitcast("float")
    return (near + (_INT4_ROUNDER - 96.0)).bitcast("i32") & 0xF


def sign_bit(values: Value, place: int) -> Value:
    """The sign of float32 values as bit `place`: i32."""
    return (values.bitcast("i32") >> (31 - place)) & (1 << place)


def magnitude(values: Value) -> Value:
    """The bits, i32, of float32 values without their sign."""
    return values.bitcast("i32") & 0x7FFFFFFF


def clamped(values: Value, limit: float) -> Value:
    """Magnitudes of float32 values, held to `limit`."""
    return magnitude(values).umin(float_bits(limit)).bitcast("float")


def pack_nibbles(code: Value) -> Value:
    """Codes 0..15, i32 of 2n lanes, to n bytes: the even lane in the low nibble."""
    pairs = code.to("i8").bitcast("i16")
    return (pairs | (pairs >> 4)).to("i8")


def join_nibbles(even: Value, odd: Value) -> Value:
    """Codes 0..15, i32, of even and of odd columns to bytes, the even ones in the low nibbles."""
    return (even | (odd << 4)).to("i8")


def unpack_nibbles(packed: Value) -> Value:
    """Inverse of `pack_nibbles`: n bytes to codes, i8 of 2n lanes."""
    wide = packed.to("i16")
    return ((wide | (wide << 4)) & 0x0F0F).bitcast("i8")


def round_to_bfloat16(x: Value) -> Value:
    """Finite float32 to the nearest bfloat16, ties to even, as its bits: i16."""
    bits = x.bitcast("i32")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to("i16")


def widen_bfloat16(bits: Value) -> Value:
    """Bits of bfloat16, i16, as float32."""
    return (bits.to("i32") << 16).bitcast("float")


def group_sum(x: Value) -> Value:
    """Sum over the lanes, added as `moequant.formats.blocks.group_sum` adds them."""
    while x.type.lanes > 1:
        low, high = x.halves()
        x = low + high
    return x


class Source:
    """Weights as they are stored.

    Args:
        dtype: bfloat16, float16 or float32, by torch's names.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.element = "i32" if dtype == "float32" else "i16"
        self.infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
        """The bits of Inf; those of finite magnitudes are less."""
        self._sign = 1 << (Type(self.element).bits - 1)
        self.least_lanes = 1
        """Fewest weights that `load` reads; a multiple of them lies in a row."""

    def load(self, function: Function, base: Value, index: Value, lanes: int) -> Value:
        """The bits of `lanes` weights at `base`, from the `index`-th on."""
        return function.load(Type(self.element, lanes), base, index)

    def prefetch(self, function: Function, base: Value, index: Value) -> None:
        """Have weights from the `index`-th on brought to the cache, if there are any."""
        function.prefetch(base, index, self.element)

    def pairs(self, stored: Value) -> tuple[Value, Value]:
        """The weights of even and those of odd index, as float32."""
        bits = stored.type.bits
        both = stored.bitcast(f"i{2 * bits}")
        return self.float(both.to(self.element)), self.float((both >> bits).to(self.element))

    def tops(self, stored: Value) -> Value:
        """The upper 16 bits of each weight, which begin with its sign."""
        return stored if stored.type.bits == 16 else (stored >> 16).to("i16")

    def number(self, bits: int) -> float:
        """The finite number that has these bits."""
        code, integer = ("e", "H") if self.dtype == "float16" else ("f", "I")
        whole = bits << 16 if self.dtype == "bfloat16" else bits
        return float(struct.unpack(f"<{code}", struct.pack(f"<{integer}", whole))[0])

    def magnitude(self, stored: Value) -> Value:
        """Bits without their sign: unsigned integers in the order of the magnitudes."""
        return stored & (self._sign - 1)

    def extremes(self, stored: Value) -> tuple[Value, Value]:
        """Magnitude bits of the largest and of the smallest weight; 0 for one of the other sign."""
        # Floats in their own order: as signed integers the positive ones, which lie above all
        # negative ones; as unsigned integers the negative ones, the lowest uppermost.
        high, low = stored.reduce("smax"), stored.reduce("umax") ^ -self._sign
        return high.smax(0), low.smax(0)

    def float(self, stored: Value) -> Value:
        """Finite weights as float32, exact."""
        if self.dtype == "bfloat16":
            return widen_bfloat16(stored)
        if self.dtype == "float32":
            return stored.bitcast("float")
        # By arithmetic: where a processor lacks the instruction, LLVM would call a library. Also
        # right for denormals; what comes of Inf and NaN is of no matter.
        bits = self.magnitude(stored).to("i32") << 13
        scaled = (bits.bitcast("float") * 2.0**112).bitcast("i32")
        return (scaled | ((stored & self._sign).to("i32") << 16)).bitcast("float")
