"""How INT4 weights lie in panels, for products with FP8.

8192 bytes of codes, then 256 of scales. Rows lie as `moequant.kernels.sm90.panels` says; of every
32 columns a thread holds 4 * quad + i and 16 + 4 * quad + i, where quad = lane % 4. Those are the A
operands of m64k32.

    codes    [block 2][columns / 64 2][warp 4][f 8][quad 4][word 4] of 32 bits
    word     columns % 64 / 32, then columns % 32 / 16; byte i; row f low, row f + 8 high
    nibble   2 * code, or -2 * code - 1 of a negative one: the lowest bit is the sign
    scales   bfloat16 [warp 4][f 8][block 2][half 2], of rows f and f + 8 of a block
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.kernels.sm90.panels import (
    CODE_BYTES,
    PANEL_COLUMNS,
    PANEL_ROWS,
    pack_panels,
    unpack_panels,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

PANEL_BYTES = CODE_BYTES + PANEL_ROWS * 2


def pack(weights: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Pack the experts' weights.

    Args:
        weights: by projection, gate and up, or one; of each, codes [E, N, K / 2] uint8, two a byte,
            the first in the low half, and scales [E, N, K / 128] bfloat16. K is a multiple of 128.

    Returns:
        [E, panels, K / 128, PANEL_BYTES] uint8.
    """
    codes = [qdata for qdata, _ in weights.values()]
    scales = [scale[..., None] for _, scale in weights.values()]
    return pack_panels(codes, scales, _pack_codes)


def unpack(packed: Tensor, n_out: int, *, gated: bool) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `pack`: codes [E, n_out, K / 2] and scales [E, n_out, K / 128].

    Args:
        packed: [E, panels, K / 128, PANEL_BYTES] uint8.
        n_out: rows of the weight, or of gate and of up each.
        gated: whether the panels hold gate and up.

    Returns:
        Those of the weight, or those of gate and then those of up.
    """
    weights = unpack_panels(packed, n_out, torch.bfloat16, _unpack_codes, gated=gated)
    return [(qdata, scale[..., 0]) for qdata, scale in weights]


def _pack_codes(qdata: Tensor, blocks: int) -> Tensor:
    """[P, block, warp, a, half, b, K / 2] of an expert as [P, K / 128, CODE_BYTES]."""
    sign = qdata >> 3 & 0x11  # of both codes of a byte
    codes = ((qdata & 0x77) ^ sign * 7) << 1 | sign
    # K / 2 as [K / 128, 64s, 32s, 16s, quad, i / 2]
    parts = codes.view(*qdata.shape[:-1], blocks, 2, 2, 2, 4, 2)
    low, high = parts[:, :, :, :, 0], parts[:, :, :, :, 1]
    packed = torch.stack([low & 0xF | high << 4, low >> 4 | high & 0xF0], -1)
    # [P, block, warp, a, b, K / 128, 64s, 32s, 16s, quad], as i is the byte of a word
    words = packed.flatten(-2).view(torch.int32)[..., 0].permute(0, 5, 1, 6, 2, 3, 4, 9, 7, 8)
    return words.reshape(qdata.shape[0], blocks, -1).view(torch.uint8)


def _unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `_pack_codes`."""
    P, blocks, _ = packed.shape
    words = packed.contiguous().view(torch.int32).view(P, blocks, 2, 2, 4, 4, 2, 4, 2, 2)
    words = words.permute(0, 2, 4, 5, 6, 1, 3, 8, 9, 7).contiguous()
    even, odd = words.view(torch.uint8).view(*words.shape, 2, 2).unbind(-1)
    codes = torch.stack([even & 0xF | odd << 4, even >> 4 | odd & 0xF0], 4)
    sign = codes & 0x11
    codes = (codes >> 1 & 0x77) ^ sign * 7 | sign << 3
    return codes.view(P, 2, 4, 4, 2, 2, blocks * PANEL_COLUMNS // 2)
