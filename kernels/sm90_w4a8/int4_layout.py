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

from moequant.kernels.sm90.panel_words import CODE_BYTES, PANEL_COLUMNS, PANEL_ROWS, PanelWords
from moequant.kernels.sm90.panels import pack_panels, unpack_panels

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
    return pack_panels(codes, scales, _WORDS)


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


def _bits(byte: Tensor, half: int, which: int) -> Tensor:
    """See `PanelWords.bits`: of codes 2 * which and 2 * which + 1."""
    word = torch.zeros_like(byte)
    for i in range(2):
        sign = byte >> (4 * i + 3) & 1
        nibble = (byte >> 4 * i & 7 ^ sign * 7) << 1 | sign
        word |= nibble << 8 * (2 * which + i) + 4 * half
    return word


_WORDS = PanelWords(bits=_bits, quad_stride=2)


def _unpack_codes(packed: Tensor) -> Tensor:
    """See `unpack_panels`."""
    P, blocks, _ = packed.shape
    words = packed.contiguous().view(torch.int32).view(P, blocks, 2, 2, 4, 4, 2, 4, 2, 2)
    words = words.permute(0, 2, 4, 5, 6, 1, 3, 8, 9, 7).contiguous()
    even, odd = words.view(torch.uint8).view(*words.shape, 2, 2).unbind(-1)
    codes = torch.stack([even & 0xF | odd << 4, even >> 4 | odd & 0xF0], 4)
    sign = codes & 0x11
    codes = (codes >> 1 & 0x77) ^ sign * 7 | sign << 3
    return codes.view(P, 2, 4, 4, 2, 2, blocks * PANEL_COLUMNS // 2)
