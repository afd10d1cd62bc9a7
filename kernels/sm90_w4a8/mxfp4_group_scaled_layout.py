"""How MXFP4 weights lie in panels that keep the scale of every group, for products with FP8.

For weights whose scales mxfp4_layout.py cannot fold. 8192 bytes of codes, as there, then 512 of
scales: E8M0 bytes [warp 4][f 8][block 2][half 2][group 4], of rows f and f + 8 of a block. Every
byte is kept, of groups of zeros too. Columns behind the last are zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.kernels.sm90.panel_words import PANEL_COLUMNS
from moequant.kernels.sm90.panels import pack_panels, unpack_panels, whole_blocks
from moequant.kernels.sm90_w4a8.mxfp4_layout import WORDS, unpack_codes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_GROUPS = 4
"""Of a row in a panel."""


def pack(weights: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Pack the experts' weights.

    Args:
        weights: as of `mxfp4_layout.pack`; scales may be any.

    Returns:
        [E, panels, ceil(K / 128), PANEL_BYTES] uint8, PANEL_BYTES of mxfp4_layout.
    """
    codes, scales = [], []
    for qdata, scale in weights.values():
        E, N, _ = qdata.shape
        codes.append(whole_blocks(qdata, PANEL_COLUMNS // 2))
        of_blocks = whole_blocks(scale.view(torch.uint8), _GROUPS)
        scales.append(of_blocks.view(E, N, codes[-1].shape[2] * 2 // PANEL_COLUMNS, _GROUPS))
    return pack_panels(codes, scales, WORDS)


def unpack(packed: Tensor, n_out: int, K: int, *, gated: bool) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `pack`; arguments and results as of `mxfp4_layout.unpack`."""
    weights = unpack_panels(packed, n_out, torch.uint8, unpack_codes, gated=gated)
    return [
        (
            qdata[..., : K // 2].contiguous(),
            scale.flatten(-2)[..., : K // 32].contiguous().view(torch.float8_e8m0fnu),
        )
        for qdata, scale in weights
    ]
