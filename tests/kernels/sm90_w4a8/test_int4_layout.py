"""Panels, read as the kernel's threads read them, hold the codes and scales they were made of."""

from __future__ import annotations

import pytest
import torch

from moequant.formats.elements import decode_int4, unpack_nibbles
from moequant.kernels.sm90.panel_words import CODE_BYTES
from moequant.kernels.sm90.panels import panels
from moequant.kernels.sm90_w4a8.int4_layout import PANEL_BYTES, pack, unpack

E, K = 2, 256


def weight(N, seed):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=g)
    return codes, torch.randn(E, N, K // 128, generator=g).bfloat16()


def decode_4(word):
    """As the kernel: one nibble of each byte of int64 words, to E4M3 bytes, to codes [..., 4]."""
    decoded = (word & 0x0E0E0E0E) + (word & 0x01010101) * 0x82
    of_bytes = torch.stack([decoded >> 8 * i & 0xFF for i in range(4)], -1).to(torch.uint8)
    return of_bytes.view(torch.float8_e4m3fn).float() * 256


def read(held_rows, packed, *, gated):
    """What threads hold: codes and scales [E, matrices, rows, K or K / 128], by weight row.

    Thread t of a warpgroup reads 16 bytes of codes twice a block of 64 weight rows, and 4 bytes of
    scales. WGMMA's A operand of 8 bits is, of warp w, lane l and register r: row
    16 * w + l / 4 + 8 * (r & 1), columns 16 * (r >> 1) + 4 * (l & 3) + 0 to 3.
    """
    _, P, blocks, _ = packed.shape
    rows = P * (64 if gated else 128)
    codes = torch.full((E, 2 if gated else 1, rows, blocks * 128), torch.nan)
    scales = torch.full((*codes.shape[:3], blocks), torch.nan)
    words = packed[..., :CODE_BYTES].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(E, P, blocks, 2, 2, 128, 4)
    parts = packed[..., CODE_BYTES:].contiguous().view(torch.bfloat16).float()
    parts = parts.view(E, P, blocks, 32, 2, 2)
    column = torch.arange(4)
    for thread, block, half, matrix, row in held_rows(gated=gated):
        quad = thread % 4
        of_panel = torch.arange(P) * (rows // P) + row
        scales[:, matrix, of_panel] = parts[:, :, :, thread // 4, block, half]
        for index in range(8):  # word `index` of the thread is half of MMA index // 2
            word = words[:, :, :, block, index // 4, thread, index % 4]
            at = 32 * (index // 2) + 16 * (index % 2) + 4 * quad + column
            at = (torch.arange(blocks)[:, None] * 128 + at).flatten()
            value = decode_4(word >> 4 * half).flatten(2)
            codes[:, matrix, of_panel[:, None], at] = value
    return codes, scales


def codes_of(qdata):
    return decode_int4(unpack_nibbles(qdata))


@pytest.mark.parametrize("N", [128, 192, 640])
def test_threads_read_the_codes_and_scales_of_their_rows(held_rows, N):
    qdata, scale = weight(N, 0)
    packed = pack({"down": (qdata, scale)})
    assert packed.shape == (E, panels(N, gated=False), K // 128, PANEL_BYTES)
    codes, scales = read(held_rows, packed, gated=False)
    assert torch.equal(codes[:, 0, :N], codes_of(qdata))
    assert torch.equal(scales[:, 0, :N], scale.float())
    assert not codes[:, 0, N:].any()


@pytest.mark.parametrize("N", [64, 128, 320])
def test_a_panel_of_gate_and_up_has_the_same_rows_of_both(held_rows, N):
    gate, up = weight(N, 0), weight(N, 1)
    packed = pack({"gate": gate, "up": up})
    assert packed.shape == (E, panels(N, gated=True), K // 128, PANEL_BYTES)
    codes, scales = read(held_rows, packed, gated=True)
    for matrix, (qdata, scale) in enumerate((gate, up)):
        assert torch.equal(codes[:, matrix], codes_of(qdata))
        assert torch.equal(scales[:, matrix], scale.float())


@pytest.mark.parametrize("N", [64, 128, 192, 640])
def test_unpacking_gives_the_bits_of_every_code_and_scale(N):
    gate, up = weight(N, 0), weight(N, 1)
    (single,) = unpack(pack({"up": gate}), N, gated=False)
    of_gate, of_up = unpack(pack({"gate": gate, "up": up}), N, gated=True)
    for got, want in ((single, gate), (of_gate, gate), (of_up, up)):
        for tensor, other in zip(got, want, strict=True):
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
            assert tensor.is_contiguous()


def test_all_sixteen_codes_decode_to_themselves(held_rows):
    qdata = torch.arange(256, dtype=torch.uint8).repeat(128, 1).view(1, 128, 256)[..., : K // 2]
    qdata = torch.cat([qdata, 255 - qdata]).contiguous()
    scale = torch.ones(E, 128, K // 128).bfloat16()
    codes, _ = read(held_rows, pack({"up": (qdata, scale)}), gated=False)
    assert torch.equal(codes[:, 0], codes_of(qdata))
    assert codes.unique().tolist() == list(range(-8, 8))


def test_panels_hold_as_many_bytes_as_codes_and_scales():
    qdata, scale = weight(256, 0)
    assert pack({"up": (qdata, scale)}).nbytes == qdata.nbytes + scale.nbytes


def test_shapes_are_known_without_data():
    meta = tuple(t.to("meta") for t in weight(192, 0))
    assert pack({"down": meta}).shape == (E, 2, K // 128, PANEL_BYTES)
    assert pack({"gate": meta, "up": meta}).shape == (E, 3, K // 128, PANEL_BYTES)
