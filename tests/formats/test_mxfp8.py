from __future__ import annotations

import pytest
import torch

from moequant.formats import QuantizedWeight, dequantize, get_format, quantize
from moequant.formats.elements import E4M3_FLOAT32_MAX, unpack_nibbles

RULES = get_format("mxfp8").options["scale_rule"]
INF = torch.tensor(torch.inf)
FLOAT32_MAX = torch.finfo(torch.float32).max


def codes(q: QuantizedWeight) -> list[list[int]]:
    return q.qdata.view(torch.uint8).tolist()


def exponents(q: QuantizedWeight) -> torch.Tensor:
    """int32, whatever the shape."""
    return q.scale.view(torch.uint8).int() - 127


def row(*values: float) -> torch.Tensor:
    """[1, 32] float32: `values`, then zeros."""
    w = torch.zeros(1, 32)
    w[0, : len(values)] = torch.tensor(values)
    return w


def rows_of_amax(amax: torch.Tensor) -> torch.Tensor:
    """[len(amax), 32] float32, each row with that amax."""
    w = torch.zeros(len(amax), 32)
    w[:, 5] = -amax
    w[:, 6] = amax / 3
    return w


def just_above(x: float) -> float:
    return torch.tensor(x).nextafter(INF).item()


def just_below(x: float) -> float:
    return torch.tensor(x).nextafter(-INF).item()


@pytest.mark.parametrize("rule", RULES)
def test_a_group_by_hand(rule: str) -> None:
    # 17 and 19 lie between 16, 18 and 20: a tie goes to the even mantissa.
    w = row(448, -256, 17, 19, 1, -1.125, 2.0**-6, 2.0**-9, 2.0**-10, 0, -0.0) * 2.0**-12
    q = quantize(w, "mxfp8", scale_rule=rule)
    assert exponents(q).tolist() == [[-12]]
    found = [0x7E, 0xF8, 0x58, 0x5A, 0x38, 0xB9, 0x08, 0x01, 0x00, 0x00, 0x80]
    assert codes(q)[0][:11] == found
    decoded = [448, -256, 16, 20, 1, -1.125, 2.0**-6, 2.0**-9, 0, 0, 0]
    assert dequantize(q)[0, :11].tolist() == [x * 2.0**-12 for x in decoded]


# amax with the exponent under ceil and floor, and the code of amax under each.
RULE_TABLE = [
    (256.0, (0, 0x78), (0, 0x78)),
    (448.0, (0, 0x7E), (0, 0x7E)),
    (just_above(448.0), (1, 0x76), (0, 0x7E)),
    (480.0, (1, 0x77), (0, 0x7E)),
    (just_below(512.0), (1, 0x78), (0, 0x7E)),
    (512.0, (1, 0x78), (1, 0x78)),
]


@pytest.mark.parametrize("shift", [-100, -1, 0, 60])
@pytest.mark.parametrize(("amax", "ceil", "floor"), RULE_TABLE)
def test_rules_choose_their_exponents(
    amax: float, ceil: tuple[int, int], floor: tuple[int, int], shift: int
) -> None:
    w = row(1e-30, amax) * 2.0**shift
    for rule, (exponent, code) in {"ceil": ceil, "floor": floor}.items():
        q = quantize(w, "mxfp8", scale_rule=rule)
        assert exponents(q).tolist() == [[exponent + shift]], rule
        assert codes(q)[0][1] == code, rule


@pytest.mark.parametrize(
    ("rule", "below"),
    [
        ("ceil", lambda amax, power: amax <= 448 * power),
        ("floor", lambda amax, power: amax < 512 * power),
    ],
)
def test_exponents_are_the_smallest_that_hold_amax_down_to_denormals(
    rule: str, below: object
) -> None:
    """Each rule is one bound: the smallest power of two of which amax is at most so many times."""
    bits = torch.arange(1, 2**31 - 2**23, 2**16 - 1, dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([1.0, 1.75]) * torch.exp2(torch.arange(-126, 127))[:, None]
    edges = edges.flatten()
    amax = [bits.view(torch.float32), edges, edges.nextafter(INF), edges.nextafter(-INF)]
    amax = torch.cat(amax).clamp(max=E4M3_FLOAT32_MAX)
    found = exponents(quantize(rows_of_amax(amax), "mxfp8", scale_rule=rule)).flatten()

    powers = torch.exp2(torch.arange(-127, 128).double())
    wanted = below(amax.double()[:, None], powers).int().argmax(-1) - 127
    assert torch.equal(found, wanted.int())


@pytest.mark.parametrize(("rule", "largest"), [("ceil", 1.875), ("floor", 1.75)])
def test_the_largest_weights_saturate_below_infinity(rule: str, largest: float) -> None:
    q = quantize(row(FLOAT32_MAX, -FLOAT32_MAX), "mxfp8", scale_rule=rule)
    # ceil codes 1.875 * 2**127 as 240 * 2**120; floor clips it to 448 * 2**119.
    assert dequantize(q)[0, :2].tolist() == [largest * 2.0**127, -largest * 2.0**127]


@pytest.mark.parametrize("rule", RULES)
def test_denormals_round_in_units_of_the_smallest_scale(rule: str) -> None:
    # 2**-127 times the least code is 2**-136, 2**-137 ties to zero.
    w = row(3 * 2.0**-127, 2.0**-136, -(2.0**-137), 2.0**-149)
    q = quantize(w, "mxfp8", scale_rule=rule)
    assert q.scale.view(torch.uint8).tolist() == [[0]]
    assert codes(q)[0][:4] == [0x44, 0x01, 0x80, 0x00]
    assert dequantize(q)[0, :2].tolist() == [3 * 2.0**-127, 2.0**-136]


@pytest.mark.parametrize("rule", RULES)
def test_a_zero_group_gets_byte_127_and_zero_codes(rule: str) -> None:
    w = torch.cat([row(0.0, -0.0), row(448.0)], dim=-1)
    q = quantize(w, "mxfp8", scale_rule=rule)
    assert q.scale.view(torch.uint8).tolist() == [[127, 127]]
    assert codes(q)[0][:32] == [0, 0x80] + [0] * 30


def test_floor_clips_below_512_to_448() -> None:
    q = quantize(row(just_below(512.0)), "mxfp8", scale_rule="floor")
    assert dequantize(q)[0, 0] == 448


@pytest.mark.parametrize("rule", RULES)
def test_every_finite_mxfp4_weight_keeps_its_numbers(rule: str) -> None:
    byte = torch.arange(255, dtype=torch.uint8)
    qdata = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    # 6 * 2**126 and more is Inf in float32.
    largest = unpack_nibbles(qdata) & 7
    assert largest.amax() == 7
    mxfp4 = QuantizedWeight(
        format="mxfp4",
        qdata=qdata[:253],
        scale=byte[:253, None].expand(-1, 16).contiguous().view(torch.float8_e8m0fnu),
        global_scale=None,
        shape=torch.Size((253, 512)),
    )
    w = dequantize(mxfp4)
    assert w.isfinite().all()
    assert torch.equal(dequantize(quantize(w, "mxfp8", scale_rule=rule)), w)


@pytest.mark.parametrize(("rule", "error"), [("ceil", 0.0266), ("floor", 0.0293)])
def test_the_error_of_each_rule_is_what_its_docstring_says(rule: str, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn((512, 2048), generator=generator) * 0.02).bfloat16()
    d = dequantize(quantize(w, "mxfp8", scale_rule=rule))
    # Six seeds of this shape and three of [1024, 4096] lie within 0.00016 of these.
    assert (d - w.float()).norm() / w.float().norm() == pytest.approx(error, abs=0.0002)
