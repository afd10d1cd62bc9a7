from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from moequant.formats import QuantizedWeight, dequantize, get_format, quantize
from moequant.formats.elements import E2M1_FLOAT32_MAX, unpack_nibbles

MXFP4 = get_format("mxfp4")
RULES = MXFP4.options["scale_rule"]
INF = torch.tensor(torch.inf)


def codes(q: QuantizedWeight) -> list[list[int]]:
    return unpack_nibbles(q.qdata).tolist()


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


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def test_a_group_by_hand() -> None:
    w = row(6, -6, 4, 3, -2, 1.5, 1, 0.5, 0, -0.0, 5, 2.5, -0.25, 0.26) * 2.0**-10
    q = quantize(w, "mxfp4")
    assert exponents(q).tolist() == [[-10]]
    assert codes(q)[0][:14] == [7, 15, 6, 5, 12, 3, 2, 1, 0, 8, 6, 4, 8, 1]
    # Columns 0 and 1 share a byte, the even one in the low nibble.
    assert q.qdata[0, 0] == 0xF7


def just_above(x: float) -> float:
    return torch.tensor(x).nextafter(INF).item()


def just_below(x: float) -> float:
    return torch.tensor(x).nextafter(-INF).item()


# amax with the exponent under even, floor, ceil, and the code of amax under each.
RULE_TABLE = [
    (4.0, (0, 6), (0, 6), (0, 6)),
    (6.0, (0, 7), (0, 7), (0, 7)),
    (just_above(6.0), (0, 7), (0, 7), (1, 5)),
    (6.9, (0, 7), (0, 7), (1, 5)),
    (just_below(7.0), (0, 7), (0, 7), (1, 5)),
    (7.0, (1, 6), (0, 7), (1, 6)),
    (7.99, (1, 6), (0, 7), (1, 6)),
    (8.0, (1, 6), (1, 6), (1, 6)),
]


@pytest.mark.parametrize("shift", [-100, -1, 0, 60])
@pytest.mark.parametrize(("amax", "even", "floor", "ceil"), RULE_TABLE)
def test_rules_choose_their_exponents(
    amax: float, even: tuple[int, int], floor: tuple[int, int], ceil: tuple[int, int], shift: int
) -> None:
    w = row(1e-30, amax) * 2.0**shift
    for rule, (exponent, code) in {"even": even, "floor": floor, "ceil": ceil}.items():
        q = quantize(w, "mxfp4", scale_rule=rule)
        assert exponents(q).tolist() == [[exponent + shift]], rule
        assert codes(q)[0][1] == code, rule


@pytest.mark.parametrize(
    ("rule", "below"),
    [
        ("even", lambda amax, power: amax < 7 * power),
        ("floor", lambda amax, power: amax < 8 * power),
        ("ceil", lambda amax, power: amax <= 6 * power),
    ],
)
def test_exponents_are_the_smallest_that_hold_amax_down_to_denormals(
    rule: str, below: object
) -> None:
    """Each rule is one bound: the smallest power of two that many times which amax stays below."""
    bits = torch.arange(1, 2**31 - 2**23, 2**16 - 1, dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([1.0, 1.5, 1.75]) * torch.exp2(torch.arange(-126, 127))[:, None]
    # Denormals lie in the bits; the neighbours of every edge in nextafter.
    edges = edges.flatten()
    amax = [bits.view(torch.float32), edges, edges.nextafter(INF), edges.nextafter(-INF)]
    amax = torch.cat(amax).clamp(max=E2M1_FLOAT32_MAX)
    found = exponents(quantize(rows_of_amax(amax), "mxfp4", scale_rule=rule)).flatten()

    powers = torch.exp2(torch.arange(-127, 128).double())
    wanted = below(amax.double()[:, None], powers).int().argmax(-1) - 127
    assert torch.equal(found, wanted.int())


@pytest.mark.parametrize("rule", RULES)
def test_exponents_stay_within_the_numbers_of_e8m0(rule: str) -> None:
    amax = torch.exp2(torch.arange(-149, 128).double()).float()
    amax = torch.cat([amax, torch.tensor([torch.finfo(torch.float32).max])])
    q = quantize(rows_of_amax(amax), "mxfp4", scale_rule=rule)
    assert exponents(q).amin() == -127
    assert exponents(q).amax() <= 126
    assert dequantize(q).isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_the_largest_weights_saturate_below_infinity(rule: str) -> None:
    largest = torch.finfo(torch.float32).max
    d = dequantize(quantize(row(largest, -largest, E2M1_FLOAT32_MAX), "mxfp4", scale_rule=rule))
    assert d[0, :3].tolist() == [E2M1_FLOAT32_MAX, -E2M1_FLOAT32_MAX, E2M1_FLOAT32_MAX]


@pytest.mark.parametrize("rule", RULES)
def test_denormals_round_in_units_of_the_smallest_scale(rule: str) -> None:
    unit = 2.0**-127
    q = quantize(row(3 * unit, unit, unit / 2, -unit / 4, 2.0**-149), "mxfp4", scale_rule=rule)
    assert q.scale.view(torch.uint8).tolist() == [[0]]
    assert codes(q)[0][:5] == [5, 2, 1, 8, 0]
    assert dequantize(q)[0, :3].tolist() == [3 * unit, unit, unit / 2]


@pytest.mark.parametrize("rule", RULES)
def test_a_zero_group_gets_byte_127_and_zero_codes(rule: str) -> None:
    w = torch.cat([row(0.0, -0.0), row(6.0)], dim=-1)
    q = quantize(w, "mxfp4", scale_rule=rule)
    assert q.scale.view(torch.uint8).tolist() == [[127, 127]]
    assert codes(q)[0][:32] == [0, 8] + [0] * 30


@pytest.mark.parametrize("rule", ["even", "ceil"])
def test_no_weight_of_any_magnitude_is_off_by_more_than_half_a_step(rule: str) -> None:
    exponent = torch.arange(-149, 127)
    w = torch.ldexp(normal(len(exponent), 64).double() * 25, exponent[:, None]).float()
    w = w.clamp(-E2M1_FLOAT32_MAX, E2M1_FLOAT32_MAX)
    q = quantize(w, "mxfp4", scale_rule=rule)
    scale = torch.exp2(exponents(q).double()).repeat_interleave(32, -1)
    x = (w.double() / scale).abs()
    half_step = torch.where(x < 2, 0.25, torch.where(x < 4, 0.5, 1.0))
    # Scales are powers of two, so no quotient is rounded but one below the smallest denormal.
    assert ((dequantize(q).double() - w.double()).abs() <= half_step * scale).all()


def test_floor_clips_by_less_than_two_steps_of_the_scale() -> None:
    q = quantize(row(just_below(8.0)), "mxfp4", scale_rule="floor")
    assert dequantize(q)[0, 0] == 6


def test_decoding_is_exact() -> None:
    q = quantize(normal(16, 256), "mxfp4")
    d = dequantize(q)
    ones = QuantizedWeight(**{**vars(q), "scale": torch.ones(16, 8).to(torch.float8_e8m0fnu)})
    exact = dequantize(ones).double() * torch.exp2(exponents(q).double()).repeat_interleave(32, -1)
    assert torch.equal(d.double(), exact)
    assert torch.equal(d.bfloat16().float(), d)


@pytest.mark.parametrize("rule", ["even", "floor", "mse"])
def test_requantizing_gives_the_same_values_and_for_rules_but_ceil_the_same_scales(
    rule: str,
) -> None:
    q = quantize(normal(64, 512), "mxfp4", scale_rule=rule)
    again = quantize(dequantize(q), "mxfp4", scale_rule=rule)
    assert torch.equal(dequantize(again), dequantize(q))
    if rule != "mse":
        assert torch.equal(exponents(again), exponents(q))
        assert torch.equal(again.qdata, q.qdata)


def group_errors(w: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
    """[N, K / 32] float64 squared error of each group."""
    return (dequantize(q).double() - w.double()).square().unflatten(-1, (-1, 32)).sum(-1)


def test_mse_finds_the_exponent_of_least_squared_error_and_it_is_never_above_even() -> None:
    w = normal(64, 512)
    even, found = (quantize(w, "mxfp4", scale_rule=rule) for rule in ("even", "mse"))
    assert (exponents(found) - exponents(even)).unique().tolist() == [-1, 0]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    least = group_errors(w, even)
    for step in (-1, 1):
        scale = torch.exp2(exponents(even).double() + step)[..., None]
        x = w.double().unflatten(-1, (-1, 32)).abs() / scale
        # The distance to the nearest of all values needs no rounding rule.
        error = ((x[..., None] - values).abs().amin(-1) * scale).square().sum(-1)
        least = torch.minimum(least, error)
    # float32 sums of 32 squares: each term off by a few 2**-24.
    torch.testing.assert_close(group_errors(w, found), least, rtol=2.0**-18, atol=0)


def test_mse_keeps_the_exponent_of_even_on_a_tie() -> None:
    # 3.5 is half a unit from 4 and, one exponent less, from 3, which is 6 halves.
    tie = quantize(row(3.5, 1.0), "mxfp4", scale_rule="mse")
    assert exponents(tie).tolist() == [[0]]
    assert codes(tie)[0][:2] == [6, 2]
    # A quarter, which only the lower exponent holds, breaks the tie.
    broken = quantize(row(3.5, 0.25), "mxfp4", scale_rule="mse")
    assert exponents(broken).tolist() == [[-1]]
    assert codes(broken)[0][:2] == [7, 1]


def test_mse_stops_at_the_smallest_scale() -> None:
    q = quantize(row(2.0**-129), "mxfp4", scale_rule="mse")
    assert exponents(q).tolist() == [[-127]]
    assert codes(q)[0][0] == 0


@pytest.mark.parametrize(
    ("rule", "error"), [("even", 0.1122), ("floor", 0.1140), ("ceil", 0.1184), ("mse", 0.1114)]
)
def test_the_error_of_each_rule_is_what_its_docstring_says(rule: str, error: float) -> None:
    w = normal(512, 2048)
    d = dequantize(quantize(w, "mxfp4", scale_rule=rule))
    # Six seeds of this shape, and three of [1024, 4096], lie within 0.00012 of these.
    assert (d - w.float()).norm() / w.float().norm() == pytest.approx(error, abs=0.0002)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compressed_tensors_makes_the_same_bytes(dtype: torch.dtype) -> None:
    w = normal(64, 512).to(dtype) * torch.exp2(torch.arange(64) - 32.0).to(dtype)[:, None]
    w[3, 32:64] = 0
    q = quantize(w, "mxfp4")
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    groups = w.float().unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    theirs = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized").compress(
        {"weight": w.float(), "weight_scale": scale}, scheme
    )
    zero = groups.abs().amax(-1) == 0
    # They give a zero group byte 0, we 127.
    assert zero.sum() == 1
    assert theirs["weight_scale"][zero].item() == 0
    assert q.scale.view(torch.uint8)[zero].item() == 127
    assert torch.equal(theirs["weight_scale"][~zero], q.scale.view(torch.uint8)[~zero])
    assert torch.equal(theirs["weight_packed"], q.qdata)
