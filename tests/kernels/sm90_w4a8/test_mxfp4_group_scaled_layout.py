"""Panels with a scale for every group hold any weights, and the bits that they were made of."""

from __future__ import annotations

import pytest
import torch

from moequant.errors import DoesNotFitError
from moequant.formats import QuantizedWeight, dequantize
from moequant.formats.elements import decode_e8m0
from moequant.kernels.sm90_w4a8 import mxfp4_layout
from moequant.kernels.sm90_w4a8.mxfp4_group_scaled_layout import pack, unpack

E = 2
SPREADS = [12, 60, 254]


def weight(N, K, octaves, seed=0):
    """Of random codes; the scales of a row are `octaves` apart, and groups of zeros further."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(0, octaves + 1, (E, N, K // 32), generator=g) + (254 - octaves) // 2
    scale[..., 0] = (254 - octaves) // 2
    scale[..., -1] = scale[..., 0] + octaves
    codes[:, ::3, 16:32] = torch.tensor([0, 8, 128, 136]).repeat(4)  # zeros of both signs
    scale[:, 0, 1], scale[:, 3, 1] = 0, 254
    return QuantizedWeight(
        format="mxfp4",
        qdata=codes,
        scale=scale.to(torch.uint8).view(torch.float8_e8m0fnu),
        global_scale=None,
        shape=torch.Size((E, N, K)),
    )


def parts(w):
    return w.qdata, w.scale


def factors(word, group):
    """The kernel's exponent of all groups, for codes times 64, and the scale of this one."""
    scale = (word >> 8 * group & 255).to(torch.uint8).view(torch.float8_e8m0fnu)
    return torch.full_like(word, 12), decode_e8m0(scale)


@pytest.mark.parametrize(("N", "K", "octaves"), [(128, 256, 254), (192, 96, 60)])
def test_threads_decode_the_weights_of_their_rows(read_panels, N, K, octaves):
    w = weight(N, K, octaves)
    weights = read_panels(pack({"down": parts(w)}), factors, gated=False)
    # 2**128 and more of a scale of 2**127 are infinite in either.
    assert torch.equal(weights[:, 0, :N, :K], dequantize(w).float())
    assert not weights[:, :, N:].any()
    assert not weights[..., K:].any()


def test_a_panel_of_gate_and_up_has_the_same_rows_of_both(read_panels):
    gate, up = weight(96, 160, 40), weight(96, 160, 200, seed=1)
    weights = read_panels(pack({"gate": parts(gate), "up": parts(up)}), factors, gated=True)
    for matrix, w in enumerate((gate, up)):
        assert torch.equal(weights[:, matrix, :96, :160], dequantize(w).float())


@pytest.mark.parametrize("octaves", SPREADS)
def test_unpacked_panels_are_the_bits_they_were_made_of(octaves):
    """Scales of groups of zeros and NaN among them."""
    gate, up = weight(192, 96, octaves), weight(192, 96, octaves, seed=1)
    gate.scale.view(torch.uint8)[1, 5, 2] = 255
    packed = pack({"gate": parts(gate), "up": parts(up)})
    for w, (qdata, scale) in zip((gate, up), unpack(packed, 192, 96, gated=True), strict=True):
        assert torch.equal(qdata, w.qdata)
        assert scale.dtype == torch.float8_e8m0fnu
        assert torch.equal(scale.view(torch.uint8), w.scale.view(torch.uint8))


def test_a_scale_of_nan_makes_its_group_nan(read_panels):
    w = weight(128, 256, 12)
    w.scale.view(torch.uint8)[0, 7, 3] = 255
    weights = read_panels(pack({"up": parts(w)}), factors, gated=False)
    want = dequantize(w).float()
    assert torch.equal(want.isnan().nonzero()[:, 2], torch.arange(96, 128))
    assert torch.equal(weights[:, 0].nan_to_num(7), want.nan_to_num(7))
    # NaN is 128 octaves above 1, so the other layout does not hold it beside ordinary scales.
    with pytest.raises(DoesNotFitError):
        mxfp4_layout.pack({"up": parts(w)})


def test_both_layouts_have_panels_of_one_size():
    w = weight(256, 256, 11)
    packed = pack({"up": parts(w)})
    assert packed.shape == mxfp4_layout.pack({"up": parts(w)}).shape
    assert packed.nbytes == w.qdata.nbytes + w.scale.nbytes


def test_shapes_are_known_without_data():
    meta = tuple(t.to("meta") for t in parts(weight(192, 96, 12)))
    assert pack({"down": meta}).shape == (E, 2, 1, mxfp4_layout.PANEL_BYTES)
    assert pack({"gate": meta, "up": meta}).shape == (E, 3, 1, mxfp4_layout.PANEL_BYTES)
