from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moequant.formats import QuantizedWeight, dequantize, get_format, quantize
from moequant.formats.elements import E4M3_FLOAT32_MAX

OPTIONS = get_format("fp8_channel").options["scale"]
FLOAT32_MAX = torch.finfo(torch.float32).max


def codes(q: QuantizedWeight) -> list[list[int]]:
    return q.qdata.view(torch.uint8).tolist()


def next_up(x: float) -> float:
    return torch.tensor(x).nextafter(torch.tensor(torch.inf)).item()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_row_by_hand(option: str) -> None:
    # 17 and 19 lie between 16, 18 and 20: a tie goes to the even mantissa.
    w = torch.tensor([[448, -256, 17, 19, 1, -1.125, 2.0**-6, 2.0**-9, 2.0**-10, 0, -0.0]])
    q = quantize(w * 2.0**-12, "fp8_channel", scale=option)
    assert q.scale.tolist() == [[2.0**-12]]
    found = [0x7E, 0xF8, 0x58, 0x5A, 0x38, 0xB9, 0x08, 0x01, 0x00, 0x00, 0x80]
    assert codes(q) == [found]
    decoded = [448, -256, 16, 20, 1, -1.125, 2.0**-6, 2.0**-9, 0, 0, 0]
    assert dequantize(q).tolist() == [[x * 2.0**-12 for x in decoded]]


@pytest.mark.parametrize("exponent", [*range(-126, -110), -40, -9, 0, 1, 30, *range(110, 119)])
def test_a_scale_is_the_next_power_of_two_exactly_from_448_on(exponent: int) -> None:
    amax = 448 * 2.0**exponent
    # Each row has its own, wherever its largest weight stands and whatever its sign.
    w = torch.tensor([[amax, 0.0, amax / 4], [amax / 4, 0.0, -next_up(amax)]])
    q = quantize(w, "fp8_channel")
    assert q.scale.tolist() == [[2.0**exponent], [2.0 ** (exponent + 1)]]
    assert codes(q)[0][0] == 0x7E
    assert dequantize(q)[1, 2].item() == -amax


def test_float32_scales_are_amax_over_448() -> None:
    w = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(0))
    q = quantize(w, "fp8_channel", scale="float32")
    assert q.scale.shape == (2, 256, 1)
    assert torch.equal(q.scale, w.abs().amax(-1, keepdim=True) / 448)
    # The largest weight of every row has the largest code.
    assert ((q.qdata.view(torch.uint8) & 0x7F).amax(-1) == 0x7E).all()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_scale_is_at_least_the_smallest_normal_number(option: str) -> None:
    w = torch.tensor([[2.0**-149], [2.0**-133], [100 * 2.0**-126]])
    assert quantize(w, "fp8_channel", scale=option).scale.tolist() == [[2.0**-126]] * 3


@pytest.mark.parametrize("option", OPTIONS)
def test_denormals_round_in_units_of_the_smallest_scale(option: str) -> None:
    # In units of 2**-126: 2**-9 is the smallest code, 2**-10 ties to 0, 1.5 * 2**-9 to 2**-8.
    w = torch.tensor([[2.0**-135, 2.0**-136, 1.5 * 2.0**-135, -(2.0**-136), 2.0**-149]])
    q = quantize(w, "fp8_channel", scale=option)
    assert codes(q) == [[0x01, 0x00, 0x02, 0x80, 0x00]]
    assert dequantize(q)[0, 0] == 2.0**-135


@pytest.mark.parametrize("option", OPTIONS)
def test_the_largest_weights_saturate_below_infinity(option: str) -> None:
    w = torch.tensor([[FLOAT32_MAX, -FLOAT32_MAX, torch.finfo(torch.bfloat16).max, 1e38]])
    d = dequantize(quantize(w, "fp8_channel", scale=option))
    # With a free scale, 448 * (max / 448) may be an ulp off.
    largest = torch.tensor([1.0, -1.0, 1.0]) * E4M3_FLOAT32_MAX
    torch.testing.assert_close(d[0, :3], largest, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_zero_row_gets_scale_one_and_keeps_its_signs(option: str) -> None:
    w = torch.tensor([[0.0, -0.0], [448.0 * 4, 0.0]])
    q = quantize(w, "fp8_channel", scale=option)
    assert q.scale.tolist() == [[1.0], [4.0]]
    assert codes(q) == [[0x00, 0x80], [0x7E, 0x00]]


def test_a_weight_that_rounds_to_zero_keeps_its_sign() -> None:
    # Beside 448, scale 1: -2**-10 is half the smallest code and ties to zero.
    q = quantize(torch.tensor([[448.0, -(2.0**-10), 2.0**-10]]), "fp8_channel")
    assert codes(q) == [[0x7E, 0x80, 0x00]]


@pytest.mark.parametrize("K", [1, 7, 128, 1000])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_row_does_not_depend_on_the_others(option: str, K: int) -> None:
    w = torch.randn(5, K, generator=torch.Generator().manual_seed(0))
    w[3] *= 1e20
    whole = quantize(w, "fp8_channel", scale=option)
    for row in range(5):
        alone = quantize(w[row : row + 1], "fp8_channel", scale=option)
        assert codes(alone) == codes(whole)[row : row + 1]
        assert torch.equal(alone.scale, whole.scale[row : row + 1])


def test_numpy_and_ml_dtypes_make_the_same_bytes() -> None:
    w = (torch.randn(259, 390, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    source = w.float().numpy()
    free = np.abs(source).max(-1, keepdims=True) / np.float32(448)
    mantissa, exponent = np.frexp(free)
    power = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
    for option, scale in {"power_of_two": power, "float32": free}.items():
        q = quantize(w, "fp8_channel", scale=option)
        assert np.array_equal(q.scale.numpy(), scale)
        theirs = (source / scale).astype(ml_dtypes.float8_e4m3fn)
        assert np.array_equal(q.qdata.view(torch.uint8).numpy(), theirs.view(np.uint8))


def test_power_of_two_scales_decode_exactly() -> None:
    q = quantize(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), "fp8_channel")
    assert torch.equal(dequantize(q).double(), q.qdata.double() * q.scale.double())
    # Four significant bits: BF16 holds every decoded weight.
    assert torch.equal(dequantize(q).bfloat16().float(), dequantize(q))


@pytest.mark.parametrize(("option", "error"), [("power_of_two", 0.02659), ("float32", 0.02646)])
def test_the_error_of_each_option_is_what_the_documentation_says(option: str, error: float) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        w = (torch.randn((1024, 4096), generator=generator) * 0.02).bfloat16()
        d = dequantize(quantize(w, "fp8_channel", scale=option))
        assert (d - w.float()).norm() / w.float().norm() == pytest.approx(error, abs=0.00005)
