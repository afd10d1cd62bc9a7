"""What one format holds of another, number for number."""

from __future__ import annotations

import pytest
import torch

from moequant.formats import QuantizedWeight, dequantize, quantize, requantize_losslessly


def mxfp4(exponents, codes=None):
    """A weight [1, 32 * groups] with these exponents; in each group every code but those given."""
    groups = len(exponents)
    packed = torch.arange(16, dtype=torch.uint8).repeat(groups).reshape(1, -1)
    packed = packed + 16 * packed.flip(-1) if codes is None else codes
    scale = torch.tensor([[e + 127 for e in exponents]], dtype=torch.uint8)
    return QuantizedWeight(
        format="mxfp4",
        qdata=packed,
        scale=scale.view(torch.float8_e8m0fnu),
        global_scale=None,
        shape=torch.Size((1, 32 * groups)),
    )


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("lowest", [-127, -126, -100, 0, 90, 110])
def test_mxfp4_up_to_17_apart_is_nvfp4_number_for_number(lowest):
    weights = [mxfp4([lowest, lowest + 17]), mxfp4([lowest + 3, lowest + 9])]
    lossless = requantize_losslessly(weights, "nvfp4")
    for before, after in zip(weights, lossless, strict=True):
        # Bytes, for a zero keeps its sign.
        assert torch.equal(raw(dequantize(after)), raw(dequantize(before)))
        assert torch.equal(after.qdata, before.qdata)
    assert torch.equal(lossless[0].global_scale, lossless[1].global_scale)


def test_mxfp4_18_apart_is_not():
    assert requantize_losslessly([mxfp4([-9, 9])], "nvfp4") is None
    assert requantize_losslessly([mxfp4([-9]), mxfp4([9])], "nvfp4") is None


def test_groups_of_zeros_have_no_exponent():
    codes = torch.zeros((1, 32), dtype=torch.uint8)
    codes[0, 16:] = 0x25
    codes[0, :2] = 0x88
    before = mxfp4([120, -20], codes)
    (after,) = requantize_losslessly([before], "nvfp4")
    assert torch.equal(raw(dequantize(after)), raw(dequantize(before)))
    nothing = mxfp4([5], torch.zeros((1, 16), dtype=torch.uint8))
    (after,) = requantize_losslessly([nothing], "nvfp4")
    assert after.global_scale == 1
    assert not dequantize(after).any()


def test_a_scale_that_is_nan_is_not_hidden():
    nan = mxfp4([0, 128], torch.zeros((1, 32), dtype=torch.uint8))
    assert requantize_losslessly([nan], "nvfp4") is None


def test_only_weights_of_one_format_are_requantized_losslessly():
    w = torch.randn(128, 128)
    assert requantize_losslessly([quantize(w, "mxfp4"), quantize(w, "nvfp4")], "nvfp4") is None
    assert requantize_losslessly([quantize(w, "fp8_block")], "mxfp4") is None


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4", "w4a8"])
def test_a_format_holds_itself(format):
    q = quantize(torch.randn(128, 128), format)
    assert requantize_losslessly([q], format) == [q]


def test_another_global_scale_moves_block_scales_or_is_refused():
    q = quantize(torch.randn(16, 64), "nvfp4")
    twice = QuantizedWeight(
        format="nvfp4",
        qdata=q.qdata,
        scale=(q.scale.float() / 2).to(torch.float8_e4m3fn),
        global_scale=q.global_scale * 2,
        shape=q.shape,
    )
    one, other = requantize_losslessly([q, twice], "nvfp4")
    assert torch.equal(one.global_scale, other.global_scale)
    assert torch.equal(dequantize(one), dequantize(q))
    assert torch.equal(dequantize(other), dequantize(twice))
    far = QuantizedWeight(
        format="nvfp4",
        qdata=q.qdata,
        scale=q.scale,
        global_scale=q.global_scale * 2.0**20,
        shape=q.shape,
    )
    assert requantize_losslessly([q, far], "nvfp4") is None
