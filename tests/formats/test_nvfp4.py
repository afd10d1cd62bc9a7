from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from moequant.formats import QuantizedWeight, dequantize, quantize
from moequant.formats.elements import E2M1_FLOAT32_MAX, unpack_nibbles

TINY = torch.finfo(torch.float32).tiny


def codes(q: QuantizedWeight) -> list[list[int]]:
    return unpack_nibbles(q.qdata).tolist()


def row(*values: float) -> torch.Tensor:
    """[1, 16] float32: `values`, then zeros."""
    w = torch.zeros(1, 16)
    w[0, : len(values)] = torch.tensor(values)
    return w


def beside_global_one(*values: float) -> torch.Tensor:
    """[1, 32]: a group of 2688, which makes the global scale 1, then a group of `values`."""
    return torch.cat([torch.full((1, 16), 2688.0), row(*values)], dim=-1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def test_a_group_by_hand() -> None:
    w = beside_global_one(6, -6, 4, 3, -2, 1.5, 1, 0.5, 0, -0.0, 5, 2.5, -0.25, 0.26)
    q = quantize(w, "nvfp4")
    assert q.global_scale == 1
    assert q.scale.float().tolist() == [[448, 1]]
    assert codes(q)[0][:16] == [7] * 16
    assert codes(q)[0][16:] == [7, 15, 6, 5, 12, 3, 2, 1, 0, 8, 6, 4, 8, 1, 0, 0]
    # Columns 0 and 1 of that group share a byte, the even one in the low nibble.
    assert q.qdata[0, 8] == 0xF7


@pytest.mark.parametrize("exponent", [-126, -125, -30, 0, 1, 40, 116])
def test_global_scale_is_the_next_power_of_two_exactly_from_2688_on(exponent: int) -> None:
    amax = torch.tensor(2688 * 2.0**exponent)
    above = amax.nextafter(torch.tensor(torch.inf))
    for x, wanted in ((amax, exponent), (above, exponent + 1)):
        assert quantize(x * row(1.0), "nvfp4").global_scale == 2.0**wanted


@pytest.mark.parametrize("option", ["power_of_two", "exact"])
def test_global_scale_and_its_reciprocal_are_normal_numbers(option: str) -> None:
    amax = torch.exp2(torch.arange(-149, 128).double()).float()
    amax = torch.cat([amax, torch.tensor([torch.finfo(torch.float32).max])])
    w = torch.zeros(len(amax), 1, 16)
    w[:, 0, 3] = -amax
    q = quantize(w, "nvfp4", global_scale=option)
    for x in (q.global_scale, 1 / q.global_scale):
        assert (x >= TINY).all()
        assert x.isfinite().all()
    # Large enough that no scale needs more than 448, but for the rounding of an exact one.
    assert (2688 * q.global_scale.double() >= amax.double() * (1 - 2.0**-23)).all()
    if option == "power_of_two":
        assert (torch.frexp(q.global_scale).mantissa == 0.5).all()
        assert torch.equal(1 / (1 / q.global_scale), q.global_scale)


def test_exact_global_scale_is_amax_over_2688() -> None:
    w = normal(3, 8, 64)
    q = quantize(w, "nvfp4", global_scale="exact")
    assert torch.equal(q.global_scale, w.float().abs().amax((-2, -1)) / 2688)
    # The group of the largest weight uses the whole range of scales.
    assert q.scale.float().amax((-2, -1)).tolist() == [448] * 3


def test_codes_are_computed_with_the_rounded_scale() -> None:
    # 6.375 / 6 = 1.0625 ties to scale 1. Then 5.25 rounds to 6; over 1.0625 it would round to 4.
    q = quantize(beside_global_one(6.375, 5.25), "nvfp4")
    assert q.scale.float().tolist() == [[448, 1]]
    assert codes(q)[0][16:18] == [7, 7]


def test_a_zero_group_gets_scale_one_and_zero_codes() -> None:
    q = quantize(beside_global_one(0.0, -0.0), "nvfp4")
    assert q.scale.float().tolist() == [[448, 1]]
    assert codes(q)[0][16:] == [0, 8] + [0] * 14


def test_a_zero_expert_among_others_has_global_scale_one() -> None:
    w = torch.stack([normal(4, 32), torch.zeros(4, 32).bfloat16()])
    q = quantize(w, "nvfp4")
    assert q.global_scale[1] == 1
    assert (dequantize(q)[1] == 0).all()


@pytest.mark.parametrize("search", ["none", "mse"])
def test_a_scale_that_underflows_is_the_smallest_one_before_codes_are_made(search: str) -> None:
    # amax / 6 = 2**-11 rounds to 0; with 2**-9 instead, 6 * 2**-11 is 1.5 units, code 3.
    q = quantize(beside_global_one(6 * 2.0**-11, -(2.0**-9), -(2.0**-12)), "nvfp4", search=search)
    assert q.scale.view(torch.uint8).tolist() == [[0x7E, 0x01]]
    assert codes(q)[0][16:19] == [3, 10, 8]


def test_a_group_lost_beside_a_huge_weight_still_has_a_scale() -> None:
    q = quantize(torch.cat([row(1e38), row(-1e-45)], dim=-1), "nvfp4")
    assert q.scale.view(torch.uint8)[0, 1] == 0x01
    assert codes(q)[0][16:] == [8] + [0] * 15


@pytest.mark.parametrize(("scale", "excess"), [(1, 3.0), (2, 1.5), (3, 1.0), (8, 0.375)])
def test_only_the_two_smallest_scales_clip_by_more_than_half_a_step(
    scale: int, excess: float
) -> None:
    # The largest amax that rounds down to `scale` times 2**-9; half a step is 1 up there.
    unit = scale * 2.0**-9
    w = beside_global_one((6 + excess) * unit * (1 - 2.0**-12))
    q = quantize(w, "nvfp4")
    assert q.scale.float()[0, 1] == unit
    error = (w - dequantize(q))[0, 16] / unit
    assert error == pytest.approx(excess, abs=10 * 2.0**-12)


def test_the_largest_weights_saturate_below_infinity() -> None:
    largest = torch.finfo(torch.float32).max
    d = dequantize(quantize(row(largest, -largest, E2M1_FLOAT32_MAX), "nvfp4"))
    assert d[0, :3].tolist() == [E2M1_FLOAT32_MAX, -E2M1_FLOAT32_MAX, E2M1_FLOAT32_MAX]


def test_power_of_two_global_scales_decode_exactly() -> None:
    q = quantize(normal(16, 256), "nvfp4")
    d = dequantize(q)
    scale = q.scale.double() * q.global_scale.double()
    values = dequantize(QuantizedWeight(**{**vars(q), "scale": torch.ones_like(q.scale)}))
    exact = values.double() / q.global_scale.double() * scale.repeat_interleave(16, -1)
    assert torch.equal(d.double(), exact)
    # Two significant bits times four: BF16 holds every decoded weight.
    assert torch.equal(d.bfloat16().float(), d)


def group_errors(w: torch.Tensor, q: QuantizedWeight) -> torch.Tensor:
    """[N, K / 16] float64 squared error of each group, in units of the global scale."""
    error = (dequantize(q).double() - w.double()) / q.global_scale.double()
    return error.square().unflatten(-1, (-1, 16)).sum(-1)


@pytest.mark.parametrize("global_scale", ["power_of_two", "exact"])
def test_search_finds_the_scale_of_least_squared_error(global_scale: str) -> None:
    w = normal(64, 256)
    plain = quantize(w, "nvfp4", global_scale=global_scale)
    found = quantize(w, "nvfp4", global_scale=global_scale, search="mse")
    steps = found.scale.view(torch.uint8).int() - plain.scale.view(torch.uint8).int()
    assert steps.unique().tolist() == list(range(-2, 7))

    least = group_errors(w, plain)
    x = w.double().unflatten(-1, (-1, 16)) / plain.global_scale.double()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    for step in range(-2, 7):
        code = (plain.scale.view(torch.uint8) + step).clamp(1, 126)
        scale = code.view(torch.float8_e4m3fn).double()[..., None]
        # The distance to the nearest of all values needs no rounding rule.
        nearest = ((x.abs() / scale)[..., None] - values).abs().amin(-1) * scale
        least = torch.minimum(least, nearest.square().sum(-1))
    # float32 sums of 16 squares: each term off by a few 2**-24.
    torch.testing.assert_close(group_errors(w, found), least, rtol=2.0**-18, atol=0)


def test_search_gains_a_seventh_on_normal_weights() -> None:
    w = normal(512, 1024)
    plain, found = (
        (dequantize(quantize(w, "nvfp4", search=search)) - w.float()).norm() / w.float().norm()
        for search in ("none", "mse")
    )
    assert plain < 0.0956
    assert found < 0.0816


def test_search_keeps_the_default_scale_on_a_tie() -> None:
    # 6, 3 and 1.5 are exact under scale 1 and, as 4, 2 and 1, under 1.5, four steps up.
    w = beside_global_one(6, 3, 1.5)
    found = quantize(w, "nvfp4", search="mse")
    assert found.scale.float().tolist() == [[448, 1]]
    assert codes(found) == codes(quantize(w, "nvfp4"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compressed_tensors_makes_the_same_bytes(dtype: torch.dtype) -> None:
    w = normal(64, 512).to(dtype) * torch.exp2(torch.arange(64) % 9).to(dtype)[:, None]
    w[3, 32:48] = 0
    q = quantize(w, "nvfp4")
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    inverse = (1 / q.global_scale).reshape(1)
    groups = w.float().unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, inverse)
    theirs = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compress(
        {"weight": w.float(), "weight_scale": scale, "weight_global_scale": inverse}, scheme
    )
    zero = groups.abs().amax(-1) == 0
    # They give a zero group scale 0.125, we 1.
    assert (theirs["weight_scale"][zero].float() == 0.125).all()
    assert (q.scale[zero].float() == 1).all()
    same = theirs["weight_scale"].view(torch.uint8) == q.scale.view(torch.uint8)
    assert same[~zero].all()
    assert torch.equal(theirs["weight_packed"], q.qdata)


def test_compressed_tensors_gives_an_underflowed_scale_another_value() -> None:
    args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    amax = torch.tensor([6 * 2.0**-11])
    scale, _ = calculate_qparams(-amax, amax, args, torch.ones(1))
    assert scale.float().item() == 0.125
    assert quantize(beside_global_one(amax.item()), "nvfp4").scale.float()[0, 1] == 2.0**-9
