"""Element codecs by hand, and against ml_dtypes, an implementation of its own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moequant.formats.elements import (
    E2M1_FLOAT32_MAX,
    E2M1_MAX,
    E4M3_FLOAT32_MAX,
    E4M3_MAX,
    E4M3_SMALLEST,
    FLOAT32_TINY,
    INT4_MAX,
    INT4_MIN,
    ceil_exponent_of,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_int4,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    encode_int4,
    pack_nibbles,
    power_of_two,
    unpack_nibbles,
)

EVERY_NIBBLE = torch.arange(16, dtype=torch.uint8)
EVERY_BYTE = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def bits(x: torch.Tensor) -> torch.Tensor:
    """float32 as int32, so that -0 and 0 differ."""
    return x.view(torch.int32)


def every_finite_bfloat16() -> torch.Tensor:
    """All 65280 of them, as float32."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = patterns.view(torch.bfloat16).float()
    x = x[x.isfinite()]
    assert len(x) == 2**16 - 2**8
    return x


def test_e2m1_code_points_agree_with_ml_dtypes() -> None:
    theirs = EVERY_NIBBLE.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(bits(decode_e2m1(EVERY_NIBBLE)), bits(torch.from_numpy(theirs)))
    assert float(ml_dtypes.finfo(ml_dtypes.float4_e2m1fn).max) == E2M1_MAX


def test_e4m3_code_points_agree_with_ml_dtypes() -> None:
    theirs = EVERY_BYTE.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ours = EVERY_BYTE.view(torch.float8_e4m3fn).float()
    number = ~np.isnan(theirs)
    assert number.sum() == 254
    assert torch.equal(ours.isnan(), torch.from_numpy(~number))
    assert torch.equal(bits(ours[number]), bits(torch.from_numpy(theirs[number])))
    limits = ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
    assert (float(limits.max), float(limits.smallest_subnormal)) == (E4M3_MAX, E4M3_SMALLEST)


def test_e8m0_code_points_agree_with_ml_dtypes() -> None:
    theirs = EVERY_BYTE.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    ours = decode_e8m0(EVERY_BYTE.view(torch.float8_e8m0fnu))
    assert torch.equal(bits(ours[:255]), bits(torch.from_numpy(theirs[:255])))
    assert ours[255].isnan()
    assert np.isnan(theirs[255])
    assert ours[0] == 2.0**-127


def test_e8m0_encodes_every_exponent_it_has() -> None:
    scale = encode_e8m0(torch.arange(-127, 128))
    assert torch.equal(scale.view(torch.uint8), EVERY_BYTE[:255])
    exact = torch.tensor([2.0**e for e in range(-127, 128)], dtype=torch.float64)
    assert torch.equal(decode_e8m0(scale).double(), exact)


def test_every_bfloat16_rounds_to_e2m1_as_in_ml_dtypes() -> None:
    x = every_finite_bfloat16()
    # Ours saturates at 6; theirs is only asked about numbers within the range.
    theirs = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert torch.equal(encode_e2m1(x), torch.from_numpy(theirs))


def test_every_bfloat16_rounds_to_e4m3_as_in_ml_dtypes() -> None:
    x = every_finite_bfloat16()
    # ml_dtypes makes NaN of 465 and more, hence the clamp.
    theirs = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert torch.equal(encode_e4m3(x).view(torch.uint8), torch.from_numpy(theirs))


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_any_float32_rounds_as_in_ml_dtypes(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    fp4 = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert torch.equal(encode_e2m1(x), torch.from_numpy(fp4))
    fp8 = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert torch.equal(encode_e4m3(x).view(torch.uint8), torch.from_numpy(fp8))


def neighbours(x: float) -> tuple[float, float]:
    below, above = (np.nextafter(np.float32(x), np.float32(to)) for to in (0, np.inf))
    return float(below), float(above)


# Each midpoint of two E2M1 numbers with the codes it lies between; it takes the even one.
E2M1_TIES = [(0.25, 0, 1), (0.75, 1, 2), (1.25, 2, 3), (1.75, 3, 4), (2.5, 4, 5), (3.5, 5, 6)]


@pytest.mark.parametrize(("tie", "low", "high"), [*E2M1_TIES, (5.0, 6, 7)])
@pytest.mark.parametrize("sign", [1, -1])
def test_e2m1_ties_go_to_the_even_code(tie: float, low: int, high: int, sign: int) -> None:
    below, above = neighbours(tie)
    codes = encode_e2m1(sign * torch.tensor([below, tie, above]))
    even = low if low % 2 == 0 else high
    sign_bit = 0 if sign > 0 else 8
    assert codes.tolist() == [sign_bit | low, sign_bit | even, sign_bit | high]


def test_e2m1_saturates_at_six() -> None:
    x = torch.tensor([6.0, 6.1, 7.0, 8.0, 1e30, torch.inf])
    assert encode_e2m1(x).tolist() == [7] * 6
    assert encode_e2m1(-x).tolist() == [15] * 6


def test_e2m1_keeps_the_sign_of_zero_and_of_what_rounds_to_it() -> None:
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 0.25, -0.25])
    assert encode_e2m1(x).tolist() == [0, 8, 0, 8, 0, 8]
    assert torch.signbit(decode_e2m1(torch.tensor([0, 8], dtype=torch.uint8))).tolist() == [0, 1]


def test_e2m1_codes_survive_decoding() -> None:
    assert torch.equal(encode_e2m1(decode_e2m1(EVERY_NIBBLE)), EVERY_NIBBLE)


# (x, code): around 448 and saturation, a normal tie up and down, subnormal ties.
E4M3_CASES = [
    (448.0, 0x7E),
    (449.0, 0x7E),
    (1e30, 0x7E),
    (float("inf"), 0x7E),
    (17.0, 0x58),  # between 16 and 18: 16 is even
    (19.0, 0x5A),  # between 18 and 20: 20 is even
    (2.0**-10, 0x00),  # between 0 and 2**-9: 0 is even
    (3 * 2.0**-10, 0x02),  # between 2**-9 and 2**-8: 2**-8 is even
    (0.0, 0x00),
]


@pytest.mark.parametrize(("x", "code"), E4M3_CASES)
def test_e4m3_rounds_to_even_and_saturates(x: float, code: int) -> None:
    assert encode_e4m3(torch.tensor([x, -x])).view(torch.uint8).tolist() == [code, code | 0x80]


def test_int4_codes_survive_decoding_and_are_twos_complement() -> None:
    assert decode_int4(EVERY_NIBBLE).tolist() == [*range(8), *range(-8, 0)]
    assert torch.equal(encode_int4(decode_int4(EVERY_NIBBLE)), EVERY_NIBBLE)


def test_int4_ties_go_to_even_and_the_range_saturates() -> None:
    x = [0.5, 1.5, -0.5, -1.5, -2.5, 6.5, 7.5, -8.5, -9.0, 1e30, -1e30, -0.0]
    wanted = [0, 2, 0, -2, -2, 6, INT4_MAX, INT4_MIN, INT4_MIN, INT4_MAX, INT4_MIN, 0]
    assert decode_int4(encode_int4(torch.tensor(x))).tolist() == wanted


def test_nibbles_pack_the_even_column_low() -> None:
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]


def test_packing_nibbles_loses_nothing() -> None:
    pairs = torch.cartesian_prod(EVERY_NIBBLE, EVERY_NIBBLE)
    assert torch.equal(unpack_nibbles(pack_nibbles(pairs)), pairs)
    assert torch.equal(pack_nibbles(unpack_nibbles(EVERY_BYTE)), EVERY_BYTE)
    batch = pairs.reshape(2, 1, 8, 32)
    assert pack_nibbles(batch).shape == (2, 1, 8, 16)
    assert torch.equal(unpack_nibbles(pack_nibbles(batch)), batch)
    assert unpack_nibbles(pack_nibbles(pairs[:, :0])).shape == (256, 0)


def test_exponents_are_exact_at_every_power_of_two_and_beside_it() -> None:
    exponent = torch.arange(-126, 128, dtype=torch.int32)
    power = power_of_two(exponent)
    assert power.tolist() == [2.0**e for e in range(-126, 128)]
    above = power.nextafter(torch.tensor(torch.inf))
    last = (power.double() * 2).float().nextafter(torch.tensor(0.0))
    for x, ceil in ((power, exponent), (above, exponent + 1), (last, exponent + 1)):
        assert torch.equal(ceil_exponent_of(x), ceil)


@pytest.mark.parametrize(
    ("largest", "element", "significand"),
    [
        (E2M1_FLOAT32_MAX, ml_dtypes.float4_e2m1fn, 1.5),
        (E4M3_FLOAT32_MAX, ml_dtypes.float8_e4m3fn, 1.875),
    ],
)
def test_the_largest_float32_of_an_element_has_its_largest_significand(
    largest: float, element: type, significand: float
) -> None:
    assert float(np.float32(significand).astype(element)) == significand
    assert float(torch.tensor(largest).bfloat16()) == largest == significand * 2.0**127
    assert 2.0 - significand == float(ml_dtypes.finfo(element).eps)


def test_float32_tiny_is_the_smallest_normal_number() -> None:
    assert torch.finfo(torch.float32).tiny == FLOAT32_TINY


def test_decoding_e4m3_is_torch_s_cast_for_every_code():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    found, wanted = decode_e4m3(codes), codes.float()
    assert torch.equal(found.isnan(), wanted.isnan())
    finite = ~wanted.isnan()
    # Bits, for a zero keeps its sign.
    assert torch.equal(found[finite].view(torch.int32), wanted[finite].view(torch.int32))
    assert torch.equal(decode_e4m3(codes[finite]), wanted[finite])
