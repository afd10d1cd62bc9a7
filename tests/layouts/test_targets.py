"""The table of kernel layouts: each is lossless, refuses by name, and says what it is for."""

from __future__ import annotations

import pytest
import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, quantize
from moequant.layouts.targets import TARGETS, kernel_layout

PREPARABLE = [(f, t) for f in CONVERTIBLE for t in TARGETS if (f, t) != ("w4a8", "sm100")]
EVERY_LAYOUT = pytest.mark.parametrize(("format", "target"), PREPARABLE)


def weight(format):
    generator = torch.Generator().manual_seed(0)
    return quantize(torch.randn(2, 128, 256, generator=generator), format)


@EVERY_LAYOUT
def test_unpack_inverts_pack_bit_for_bit(format, target):
    layout, q = kernel_layout(format, target), weight(format)
    assert layout.format == format
    again = layout.unpack(layout.pack(q, "w2"), q.shape, "w2")
    assert (again.format, again.shape) == (q.format, q.shape)
    assert again.tensors().keys() == q.tensors().keys()
    for part, tensor in q.tensors().items():
        restored = again.tensors()[part]
        assert (restored.dtype, restored.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (restored, tensor)))


@EVERY_LAYOUT
def test_a_tensor_missing_or_of_another_shape_is_named(format, target):
    layout, q = kernel_layout(format, target), weight(format)
    tensors = layout.pack(q, "w2")
    for part, tensor in tensors.items():
        without = {name: t for name, t in tensors.items() if name != part}
        with pytest.raises(CheckpointError, match=rf"^layers\.3\.w2\.{part} is missing"):
            layout.unpack(without, q.shape, "layers.3.w2")
        with pytest.raises(CheckpointError, match=rf"^layers\.3\.w2\.{part}"):
            layout.unpack({**tensors, part: tensor[..., :-1]}, q.shape, "layers.3.w2")


def test_what_has_no_layout_is_refused_with_what_there_is():
    with pytest.raises(UnsupportedError, match=r"unknown format 'bogus'; use one of: fp8_block"):
        kernel_layout("bogus", "sm90")
    with pytest.raises(UnsupportedError, match=r"no target is called 'sm75'; there are: sm90"):
        kernel_layout("mxfp4", "sm75")
    with pytest.raises(UnsupportedError, match=r"w4a8 has no kernel on sm100.* for sm90"):
        kernel_layout("w4a8", "sm100")
