"""Panels of MXFP4, decoded as the threads of kernels decode them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from moequant.kernels.sm90.panel_words import CODE_BYTES


@pytest.fixture
def read_panels(held_rows):
    """read_panels(packed, factors, gated=...): see `read`."""
    return partial(read, held_rows)


def table(exponent):
    """The kernel's E4M3 numbers of the eight magnitudes, float32 [..., 8]; int64 exponents."""
    words = exponent * 0x08080800 + 0x0C080000, exponent * 0x08080808 + 0x1C181410
    every = [word >> 8 * i & 0xFF for word in words for i in range(4)]
    return torch.stack(every, -1).to(torch.uint8).view(torch.float8_e4m3fn).float()


def read(held_rows, packed, factors, *, gated):
    """What threads hold, [E, matrices, rows, K] float32, by weight row.

    Which row and columns a word has is as in test_int4_layout. `factors` takes words of scales and
    the number of a group to exponents for `table`, and scales, float32.
    """
    E, P, blocks, _ = packed.shape
    rows = P * (64 if gated else 128)
    weights = torch.full((E, 2 if gated else 1, rows, blocks * 128), torch.nan)

    def words(part, *shape):
        return part.contiguous().view(torch.int32).long().view(E, P, blocks, *shape)

    codes = words(packed[..., :CODE_BYTES], 2, 2, 128, 4)
    scales = words(packed[..., CODE_BYTES:], 32, 2, 2)
    of_panel = torch.arange(P) * (rows // P)
    for thread, block, half, matrix, row in held_rows(gated=gated):
        quad = thread % 4
        scale = scales[:, :, :, thread // 4, block, half]
        for index in range(8):
            word = codes[:, :, :, block, index // 4, thread, index % 4]
            exponent, by = factors(scale, index // 2)
            magnitudes = table(exponent)
            for i in range(4):
                picked = word >> (16 * half + 4 * i) & 7
                sign = 1 - 2 * (word >> (8 * i + 7 - 4 * half) & 1)
                value = magnitudes.gather(-1, picked[..., None])[..., 0] * sign
                column = 32 * (index // 2) + 16 * (index % 2) + 4 * quad + i
                at = torch.arange(blocks) * 128 + column
                weights[:, matrix, (of_panel + row)[:, None], at] = value / 64 * by
    return weights
