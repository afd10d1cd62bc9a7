"""Panels, decoded as the kernel's threads decode them, hold the weights they were made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moequant.errors import DoesNotFitError
from moequant.formats import dequantize, quantize
from moequant.kernels.sm90.panel_words import CODE_BYTES
from moequant.kernels.sm90_w4a16.layout import pack, panel_bytes, unpack

E = 2
every_format = pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])


def weight(format, N, K, seed=0):
    """Of scales that differ, zeros among them, and of NVFP4 subnormal ones."""
    g = torch.Generator().manual_seed(seed)
    octaves = torch.randint(-8, 1, (E, N, K // 16, 1), generator=g)
    x = torch.randn(E, N, K // 16, 16, generator=g) * torch.exp2(octaves.float())
    x[0, 1, -1] = 0
    return quantize(x.flatten(-2), format)


def parts(w):
    return w.qdata, w.scale, w.global_scale


def bfloat16(bits):
    """int64 to the bfloat16 numbers of these 16 bits, as float32."""
    return (bits & 0xFFFF).int().bitwise_left_shift(16).view(torch.float32)


def decode(word):
    """As the kernel: a word to four pairs of bfloat16, [..., 4, 2]."""
    pairs = [word, word << 6, word << 4 ^ word >> 4, word >> 6 | word << 26]
    masked = [x & 0x81C081C0 for x in pairs]
    return torch.stack([torch.stack([bfloat16(x), bfloat16(x >> 16)], -1) for x in masked], -2)


def decode_scale(format, word, group):
    """As the kernel: the scale of one of a word's four groups."""
    if group % 2 == 1:
        word = word >> 8 | word << 24
    word = word & 0x0FF00FF0 | 0x70007000 if format == "nvfp4" else word & 0x7F807F80
    return bfloat16(word >> 16 * (group // 2))


def read(format, packed, factor):
    """What threads hold, [E, matrices, rows, K] float32, by weight row.

    Thread t of a warpgroup reads 16 bytes of codes twice a block of 64 weight rows. WGMMA's A
    operand of 16 bits is, of warp w, lane l and register r: row 16 * w + l / 4 + 8 * (r & 1),
    columns 8 * (r >> 1) + 2 * (l & 3) + 0 and 1.
    """
    _, P, blocks, size = packed.shape
    gated = factor.shape[1] == 2
    rows = P * (64 if gated else 128)
    weights = torch.full((E, factor.shape[1], rows, blocks * 128), torch.nan)
    words = packed[..., :CODE_BYTES].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(E, P, blocks, 2, 2, 128, 4)
    groups = (size - CODE_BYTES) // 128
    scale_words = packed[..., CODE_BYTES:].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    scale_words = scale_words.view(E, P, blocks, 32, 2, 2, groups // 4)
    of_panel = torch.arange(P) * (rows // P)
    for thread in range(128):
        warp, f, quad = thread // 32, thread % 32 // 4, thread % 4
        for block in range(2):
            for step in range(8):
                word = words[:, :, :, block, step // 4, thread, step % 4]
                pairs = decode(word)
                for register in range(4):
                    half = register & 1
                    if gated:
                        matrix, row = block, 16 * warp + f // 2 * 4 + half * 2 + f % 2
                    else:
                        matrix, row = 0, 32 * warp + f // 2 * 8 + block * 4 + half * 2 + f % 2
                    of_word, group = divmod(step * groups // 8, 4)
                    scale_word = scale_words[:, :, :, thread // 4, block, half, of_word]
                    scale = decode_scale(format, scale_word, group)
                    value = pairs[..., register, :] * scale[..., None]
                    exact = torch.equal(value.bfloat16().float().nan_to_num(), value.nan_to_num())
                    assert exact  # what the kernel rounds to
                    column = 16 * step + 8 * (register >> 1) + 2 * quad + torch.arange(2)
                    at = (torch.arange(blocks)[:, None] * 128 + column).flatten()
                    by = factor[:, matrix, None, None]
                    weights[:, matrix, (of_panel + row)[:, None], at] = value.flatten(2) * by
    return weights


@every_format
@pytest.mark.parametrize(("N", "K"), [(128, 256), (192, 96), (320, 160)])
def test_threads_decode_the_weights_of_their_rows(format, N, K):
    w = weight(format, N, K)
    weights = read(format, *pack([parts(w)]))
    assert torch.equal(weights[:, 0, :N, :K], dequantize(w).float())
    assert not weights[:, :, N:].any()
    assert not weights[..., K:].any()


@every_format
@pytest.mark.parametrize(("N", "K"), [(64, 128), (160, 96)])
def test_a_panel_of_gate_and_up_has_the_same_rows_of_both(format, N, K):
    gate, up = weight(format, N, K), weight(format, N, K, seed=1)
    weights = read(format, *pack([parts(gate), parts(up)]))
    for matrix, w in enumerate((gate, up)):
        assert torch.equal(weights[:, matrix, :N, :K], dequantize(w).float())


@every_format
@pytest.mark.parametrize(("N", "K"), [(128, 256), (192, 96)])
def test_unpacked_panels_are_the_bits_they_were_made_of(format, N, K):
    gate, up = weight(format, N, K), weight(format, N, K, seed=1)
    for weights in ([gate], [gate, up]):
        for w, (qdata, scale, global_scale) in zip(
            weights, unpack(*pack([parts(w) for w in weights]), N, K), strict=True
        ):
            assert torch.equal(qdata, w.qdata)
            assert torch.equal(scale.view(torch.uint8), w.scale.view(torch.uint8))
            if w.global_scale is None:
                assert global_scale is None
            else:
                assert torch.equal(global_scale, w.global_scale)


def test_every_e4m3_scale_survives():
    codes = torch.full((1, 1, 8 * 126), 0x21, dtype=torch.uint8)
    scale = torch.arange(1, 127, dtype=torch.uint8).view(1, 1, 126).view(torch.float8_e4m3fn)
    packed, factor = pack([(codes, scale, torch.ones(1))])
    ((qdata, again, _),) = unpack(packed, factor, 1, 16 * 126)
    assert torch.equal(again.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(qdata, codes)


@every_format
def test_a_scale_of_nan_makes_its_group_nan_and_no_others(format):
    w = weight(format, 128, 128)
    w.scale.view(torch.uint8)[0, 3, 2] = 255
    w.scale.view(torch.uint8)[1] = 255  # no scale of this expert is a number
    packed, factor = pack([parts(w)])
    wanted = dequantize(w).float()
    got = read(format, packed, factor)[:, 0]
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
    ((qdata, scale, global_scale),) = unpack(packed, factor, 128, 128)
    again = replace(w, qdata=qdata, scale=scale, global_scale=global_scale)
    assert torch.equal(dequantize(again).float().nan_to_num(7), wanted.nan_to_num(7))


def test_the_sign_of_an_nvfp4_scale_counts():
    w = weight("nvfp4", 128, 128)
    w.scale.view(torch.uint8)[:, ::3, 1::2] |= 0x80
    packed, factor = pack([parts(w)])
    wanted = dequantize(w).float()
    assert bool((w.scale.float() < 0).any())
    assert torch.equal(read("nvfp4", packed, factor)[:, 0], wanted)
    ((qdata, scale, global_scale),) = unpack(packed, factor, 128, 128)
    again = replace(w, qdata=qdata, scale=scale, global_scale=global_scale)
    assert torch.equal(dequantize(again).float(), wanted)


@pytest.mark.parametrize(("exponent", "fits"), [(120, True), (121, False)])
def test_a_global_scale_whose_factor_is_no_float32_is_refused(exponent, fits):
    w = weight("nvfp4", 128, 128)
    w.global_scale[1] = 2.0**exponent
    if fits:
        assert bool(pack([parts(w)])[1].isfinite().all())
        return
    with pytest.raises(
        DoesNotFitError, match=r"of expert 1 is 2\.66e\+36, but .* less than 2\.66e"
    ):
        pack([parts(w)])


def test_codes_under_a_scale_of_0_become_0():
    codes = torch.full((1, 1, 16), 0x77, dtype=torch.uint8)
    scale = torch.tensor([[[0, 56]]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    ((qdata, again, _),) = unpack(*pack([(codes, scale, torch.ones(1))]), 1, 32)
    assert qdata.tolist() == [[[0] * 8 + [0x77] * 8]]
    assert torch.equal(again.view(torch.uint8), scale.view(torch.uint8))


@every_format
def test_panels_hold_as_many_bytes_as_codes_and_scales(format):
    w = weight(format, 256, 256)
    assert pack([parts(w)])[0].nbytes == w.qdata.nbytes + w.scale.nbytes


@every_format
def test_shapes_are_known_without_data(format):
    w = weight(format, 192, 96)
    meta = tuple(None if t is None else t.to("meta") for t in parts(w))
    packed, factor = pack([meta, meta])
    assert packed.shape == (E, 3, 1, panel_bytes(format))
    assert factor.shape == (E, 2)


@every_format
def test_codes_may_begin_at_any_byte(format):
    w = weight(format, 64, 128)
    memory = torch.empty(w.qdata.numel() + 1, dtype=torch.uint8)
    shifted = memory[1:].view(w.qdata.shape).copy_(w.qdata)
    wanted = pack([parts(w)])
    for found, expected in zip(pack([(shifted, *parts(w)[1:])]), wanted, strict=True):
        assert torch.equal(found, expected)
