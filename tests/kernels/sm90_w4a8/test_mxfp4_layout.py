"""Panels, decoded as the kernel's threads decode them, hold the weights they were made of."""

from __future__ import annotations

import pytest
import torch

from moequant.errors import DoesNotFitError
from moequant.formats import QuantizedWeight, dequantize, quantize
from moequant.kernels.sm90_w4a8.mxfp4_layout import PANEL_BYTES, pack, unpack

E = 2


def weight(N, K, seed=0):
    """Of scales that differ from group to group, zeros among them."""
    g = torch.Generator().manual_seed(seed)
    octaves = torch.randint(-3, 4, (E, N, K // 32, 1), generator=g)
    x = torch.randn(E, N, K // 32, 32, generator=g) * torch.exp2(octaves.float())
    x[0, 1, -1] = 0
    return quantize(x.flatten(-2), "mxfp4")


def parts(w):
    return w.qdata, w.scale


def factors(word, group):
    """The kernel's exponent of a group, and the scale of its span, of words of scales."""
    span = (word & 0xFFFF).int().bitwise_left_shift(16).view(torch.float32)
    return word >> (16 + 4 * group) & 15, span


@pytest.mark.parametrize(("N", "K"), [(128, 256), (192, 96), (320, 160)])
def test_threads_decode_the_weights_of_their_rows(read_panels, N, K):
    w = weight(N, K)
    weights = read_panels(pack({"up": parts(w)}), factors, gated=False)
    assert torch.equal(weights[:, 0, :N, :K], dequantize(w).float())
    assert not weights[:, :, N:].any()
    assert not weights[..., K:].any()


@pytest.mark.parametrize(("N", "K"), [(64, 128), (160, 96)])
def test_a_panel_of_gate_and_up_has_the_same_rows_of_both(read_panels, N, K):
    gate, up = weight(N, K), weight(N, K, seed=1)
    weights = read_panels(pack({"gate": parts(gate), "up": parts(up)}), factors, gated=True)
    for matrix, w in enumerate((gate, up)):
        assert torch.equal(weights[:, matrix, :N, :K], dequantize(w).float())


@pytest.mark.parametrize(("N", "K"), [(128, 256), (192, 96)])
def test_unpacked_panels_are_the_bits_they_were_made_of(N, K):
    gate, up = weight(N, K), weight(N, K, seed=1)
    packed = pack({"gate": parts(gate), "up": parts(up)})
    for w, (qdata, scale) in zip((gate, up), unpack(packed, N, K, gated=True), strict=True):
        assert torch.equal(qdata, w.qdata)
        assert torch.equal(scale.view(torch.uint8), w.scale.view(torch.uint8))
    ((qdata, _),) = unpack(pack({"up": parts(gate)}), N, K, gated=False)
    assert torch.equal(qdata, gate.qdata)


def of_exponents(*bytes_of_groups):
    """A weight of one row whose codes are all 1, 1.5 in the last group."""
    scale = torch.tensor([[bytes_of_groups]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    qdata = torch.full((1, 1, 16 * len(bytes_of_groups)), 0x22, dtype=torch.uint8)
    qdata[..., -16:] = 0x33
    return QuantizedWeight(
        format="mxfp4",
        qdata=qdata,
        scale=scale,
        global_scale=None,
        shape=torch.Size((1, 1, 32 * len(bytes_of_groups))),
    )


def test_scales_up_to_eleven_octaves_apart_fold_and_others_are_refused():
    w = of_exponents(127, 116, 120, 121)
    ((qdata, scale),) = unpack(pack({"up": parts(w)}), 1, 128, gated=False)
    assert torch.equal(scale.view(torch.uint8), w.scale.view(torch.uint8))
    assert torch.equal(qdata, w.qdata)
    w = of_exponents(127, 115, 120, 121)
    with pytest.raises(DoesNotFitError):
        pack({"up": parts(w)})
    w.qdata[..., 16:32] = 0x80  # zeros: that scale counts nothing
    ((_, scale),) = unpack(pack({"up": parts(w)}), 1, 128, gated=False)
    assert scale.view(torch.uint8).tolist() == [[[127, 127, 120, 121]]]


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_scales_too_far_apart_are_refused_by_projection_and_expert(projection):
    near, far = (of_exponents(127, byte, 120, 121) for byte in (116, 114))
    qdata, scale = (torch.cat(pair) for pair in zip(parts(near), parts(far), strict=True))
    fine = (
        {"down": parts(near)} if projection == "down" else {p: parts(near) for p in ("gate", "up")}
    )
    with pytest.raises(DoesNotFitError) as refused:
        pack(fine | {projection: (qdata, scale)})
    assert str(refused.value) == (
        f"{projection} of expert 1: the scales of a row lie 13 octaves apart, but at most 11 "
        "can be folded into codes; pack them with a scale for each group"
    )


@pytest.mark.parametrize("byte", [0, 1, 254])
def test_scales_at_the_ends_of_their_range_survive(byte):
    w = of_exponents(byte, byte, byte, byte)
    ((_, scale),) = unpack(pack({"up": parts(w)}), 1, 128, gated=False)
    assert torch.equal(scale.view(torch.uint8), w.scale.view(torch.uint8))


def test_panels_hold_as_many_bytes_as_codes_and_scales():
    w = weight(256, 256)
    assert pack({"up": parts(w)}).nbytes == w.qdata.nbytes + w.scale.nbytes


def test_shapes_are_known_without_data():
    w = weight(192, 96)
    meta = w.qdata.to("meta"), w.scale.to("meta")
    assert pack({"down": meta}).shape == (E, 2, 1, PANEL_BYTES)
    assert pack({"gate": meta, "up": meta}).shape == (E, 3, 1, PANEL_BYTES)
