from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moequant.formats import (
    QuantizedWeight,
    dequantize,
    get_format,
    quantize,
    requantize_losslessly,
    row_tiles,
)
from moequant.formats.elements import E4M3_FLOAT32_MAX
from moequant.quantizers import NativeQuantizer

FORMAT = get_format("fp8_tensor")
OPTIONS = FORMAT.options["scale"]


def codes(q: QuantizedWeight) -> list[list[int]]:
    return q.qdata.view(torch.uint8).tolist()


def pair(rows: int = 259, columns: int = 390) -> list[torch.Tensor]:
    """Gate and up, whose largest magnitudes differ."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, columns, generator=generator) * s).bfloat16() for s in (0.02, 0.3)]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_matrix_by_hand(option: str) -> None:
    # 17 and 19 lie between 16, 18 and 20: a tie goes to the even mantissa.
    w = torch.tensor([[448, -256, 17, 19], [1, -1.125, 2.0**-9, -(2.0**-10)]]) * 2.0**-12
    q = quantize(w, "fp8_tensor", scale=option)
    assert q.scale.tolist() == [[2.0**-12]]
    assert codes(q) == [[0x7E, 0xF8, 0x58, 0x5A], [0x38, 0xB9, 0x01, 0x80]]
    decoded = [[448, -256, 16, 20], [1, -1.125, 2.0**-9, 0]]
    assert (dequantize(q) * 2**12).tolist() == decoded


@pytest.mark.parametrize("option", OPTIONS)
def test_a_fused_set_has_the_scale_of_its_largest_weight(option: str) -> None:
    found = FORMAT.quantize_fused(pair(), {"scale": option}, names=["gate", "up"])
    largest = max(w.abs().max().item() for w in pair())
    wanted = np.float32(largest) / np.float32(448)
    if option == "power_of_two":
        wanted = np.float32(2.0 ** np.ceil(np.log2(wanted)))
    assert [q.scale.tolist() for q in found] == [[[wanted]], [[wanted]]]
    assert all(q.global_scale is None for q in found)
    for w, q in zip(pair(), found, strict=True):
        theirs = (w.float().numpy() / wanted).astype(ml_dtypes.float8_e4m3fn)
        assert np.array_equal(q.qdata.view(torch.uint8).numpy(), theirs.view(np.uint8))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", [(0, 32), (1, 1), (7, 16), (700, 1000)])
def test_the_compiled_quantizer_gives_the_same_bytes(shape: tuple[int, int], option: str) -> None:
    options, names = {"scale": option}, ["gate", "up"]
    native = NativeQuantizer()
    for weights in (pair(*shape), pair(*shape)[::-1], pair(*shape), pair(*shape)):
        wanted = FORMAT.quantize_fused(weights, options, names=names)
        found = native.quantize_fused(FORMAT, weights, options, names=names)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.qdata.view(torch.uint8), other.qdata.view(torch.uint8))
            assert torch.equal(one.scale, other.scale)


def requantized_by_engines(q: QuantizedWeight, largest: torch.Tensor) -> torch.Tensor:
    """What vLLM 0.33.0 and SGLang 0.5.23 make of gate's and up's codes when they load them.

    fp8_utils.py: process_fp8_weight_tensor_strategy_moe; compressed_tensors_w8a8_fp8_moe.py.
    """
    numbers = q.qdata.to(torch.float16) * q.scale.reshape(())
    assert numbers.dtype == torch.float16
    scaled = (numbers.float() * largest.reciprocal()).clamp(-448, 448)
    return scaled.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("exponent", [-15, -9, 0, 7])
def test_engines_that_requantize_gate_and_up_change_no_code(exponent: int) -> None:
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    w = every[every.isfinite()][None] * 2.0**exponent
    q = FORMAT.quantize(w)
    assert q.scale.tolist() == [[2.0**exponent]]
    found = requantized_by_engines(q, q.scale.reshape(()))
    assert torch.equal(found.view(torch.uint8), q.qdata.view(torch.uint8))
    assert torch.equal(dequantize(q), w)


@pytest.mark.parametrize("option", OPTIONS)
def test_zeros_get_scale_one_and_the_largest_weights_saturate(option: str) -> None:
    zeros = quantize(torch.tensor([[0.0, -0.0]]), "fp8_tensor", scale=option)
    assert (zeros.scale.tolist(), codes(zeros)) == ([[1.0]], [[0x00, 0x80]])
    w = torch.tensor([[torch.finfo(torch.float32).max, -torch.finfo(torch.bfloat16).max]])
    found = dequantize(quantize(w, "fp8_tensor", scale=option))
    # With a free scale, 448 * (max / 448) may be an ulp off.
    largest = torch.tensor([[1.0, -1.0]]) * E4M3_FLOAT32_MAX
    torch.testing.assert_close(found, largest, rtol=2.0**-23, atol=0)


def test_tiles_have_few_rows_and_the_scale_of_the_matrix() -> None:
    q = quantize(torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0)), "fp8_tensor")
    tiles = [*row_tiles(q)]
    assert len(tiles) > 1
    joined = torch.cat([dequantize(tile) for _, tile in tiles])
    assert torch.equal(joined, dequantize(q))


def test_rows_get_the_scale_of_the_matrix_without_loss() -> None:
    gate, up = FORMAT.quantize_fused(pair(), names=["gate", "up"])
    rows = requantize_losslessly([gate, up], "fp8_channel")
    assert rows is not None
    for q, before in zip(rows, (gate, up), strict=True):
        assert q.scale.shape == (259, 1)
        assert torch.equal(dequantize(q), dequantize(before))


def test_weights_with_scales_of_their_own_are_quantized_again() -> None:
    apart = [FORMAT.quantize(w) for w in pair()]
    assert apart[0].scale != apart[1].scale
    assert requantize_losslessly(apart, "fp8_tensor") is None
    together = FORMAT.quantize_fused(pair(), names=["gate", "up"])
    assert requantize_losslessly(together, "fp8_tensor") == together
