from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from moequant.formats import dequantize, get_format, quantize
from moequant.formats.elements import E4M3_FLOAT32_MAX


def codes(q: object) -> torch.Tensor:
    return q.qdata.view(torch.uint8)


def next_up(x: float) -> float:
    return float(np.nextafter(np.float32(x), np.float32(np.inf)))


@pytest.mark.parametrize("exponent", [*range(-126, -110), -40, -9, 0, 1, 30, *range(110, 119)])
def test_scale_is_the_next_power_of_two_exactly_from_448_on(exponent: int) -> None:
    amax = 448 * 2.0**exponent
    exact = quantize(torch.tensor([[amax]]), "fp8_block")
    assert exact.scale.item() == 2.0**exponent
    assert codes(exact).item() == 0x7E
    above = quantize(torch.tensor([[next_up(amax)]]), "fp8_block")
    assert above.scale.item() == 2.0 ** (exponent + 1)
    assert dequantize(above).item() == amax


def test_scale_is_at_least_the_smallest_normal_number() -> None:
    for option in ("power_of_two", "float32"):
        for amax in (2.0**-149, 2.0**-133, 100 * 2.0**-126):
            assert quantize(torch.tensor([[amax]]), "fp8_block", scale=option).scale == 2.0**-126


def test_denormal_weights_keep_what_the_smallest_scale_can_hold() -> None:
    # In units of 2**-126: 2**-9 is the smallest code, 2**-10 ties to 0, 1.5 * 2**-9 to 2**-8.
    w = torch.tensor([[2.0**-135, 2.0**-136, 1.5 * 2.0**-135, -(2.0**-136), 2.0**-149]])
    assert codes(quantize(w, "fp8_block")).tolist() == [[0x01, 0x00, 0x02, 0x80, 0x00]]
    assert dequantize(quantize(w, "fp8_block"))[0, 0] == 2.0**-135


@pytest.mark.parametrize("option", ["power_of_two", "float32"])
def test_the_largest_weights_saturate_below_infinity(option: str) -> None:
    largest = torch.finfo(torch.float32).max
    w = torch.tensor([[largest, -largest, torch.finfo(torch.bfloat16).max, 1e38]])
    d = dequantize(quantize(w, "fp8_block", scale=option))
    # With a free scale, 448 * (max / 448) may be an ulp off.
    torch.testing.assert_close(
        d[0, :3], torch.tensor([1.0, -1.0, 1.0]) * E4M3_FLOAT32_MAX, rtol=2.0**-23, atol=0
    )


def test_a_zero_block_gets_scale_one_and_keeps_its_signs() -> None:
    w = torch.zeros(256, 256)
    w[0, 0] = -0.0
    w[128:, 128:] = 448.0 * 4
    q = quantize(w, "fp8_block")
    assert q.scale.tolist() == [[1.0, 1.0], [1.0, 4.0]]
    assert codes(q)[0, :2].tolist() == [0x80, 0x00]


def test_a_weight_that_rounds_to_zero_keeps_its_sign() -> None:
    # Beside 448, scale 1: -2**-10 is half the smallest code and ties to zero.
    q = quantize(torch.tensor([[448.0, -(2.0**-10), 2.0**-10]]), "fp8_block")
    assert codes(q).tolist() == [[0x7E, 0x80, 0x00]]


@pytest.mark.parametrize(("N", "K"), [(1, 1), (128, 128), (129, 127), (130, 257), (1, 300)])
def test_ragged_blocks_have_their_own_scales(N: int, K: int) -> None:
    tiles = -(-N // 128), -(-K // 128)
    rows, cols = torch.arange(N) // 128, torch.arange(K) // 128
    exponent = rows[:, None] * tiles[1] + cols
    w = 448 * torch.exp2(exponent.float())
    q = quantize(w, "fp8_block")
    assert torch.equal(q.scale, torch.exp2(torch.arange(tiles[0] * tiles[1])).reshape(tiles))
    assert (codes(q) == 0x7E).all()
    assert torch.equal(dequantize(q), w)


def test_numpy_and_ml_dtypes_make_the_same_bytes() -> None:
    w = (torch.randn(259, 390, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    q = quantize(w, "fp8_block")
    source = w.float().numpy()
    for i in range(3):
        for j in range(4):
            block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            mantissa, exponent = math.frexp(float(np.abs(source[block]).max()) / 448)
            scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
            theirs = (source[block] / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn)
            assert q.scale[i, j] == scale
            assert np.array_equal(codes(q)[block].numpy(), theirs.view(np.uint8))


def test_power_of_two_scales_decode_exactly() -> None:
    q = quantize(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), "fp8_block")
    exact = q.qdata.double() * q.scale.double().repeat_interleave(128, -1)
    assert torch.equal(dequantize(q).double(), exact)
    # Four significant bits: BF16 holds every decoded weight.
    assert torch.equal(dequantize(q).bfloat16().float(), dequantize(q))


def test_float32_scales_are_amax_over_448() -> None:
    w = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(0))
    q = quantize(w, "fp8_block", scale="float32")
    amax = w.abs().unflatten(-1, (3, 128)).unflatten(-3, (2, 128)).amax((-3, -1))
    assert torch.equal(q.scale, amax / 448)
    assert (codes(q) & 0x7F).amax() == 0x7E


def test_float32_scales_come_back_to_within_an_ulp() -> None:
    # amax decodes to fl(448 * s), and fl(fl(448 * s) / 448) is s or a neighbour of it: two
    # roundings of 2**-24 each. Codes stay, so values move by those and their own rounding.
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    q = quantize(w, "fp8_block", scale="float32")
    d = dequantize(q)
    again = quantize(d, "fp8_block", scale="float32")
    assert torch.equal(codes(again), codes(q))
    torch.testing.assert_close(dequantize(again), d, rtol=3 * 2.0**-24, atol=0)


def test_free_scales_gain_next_to_nothing_on_bfloat16_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(1024, 1024, generator=generator) * 0.02).bfloat16()
    error = {
        scale: (dequantize(quantize(w, "fp8_block", scale=scale)) - w.float()).norm()
        for scale in get_format("fp8_block").options["scale"]
    }
    assert error["float32"] < error["power_of_two"] < 1.01 * error["float32"]
