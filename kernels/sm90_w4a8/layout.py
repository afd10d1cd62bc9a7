"""How W4A8 weights lie for the kernel: panels of 128 weight rows x 128 columns.

A panel is what a warpgroup reads of a stage: 8192 bytes of codes, then 256 of scales. Its rows are
two blocks of 64, the M of WGMMA: for gate and up, 64 rows of either; else 128 rows in order. Within
a block, warp w has 16 rows, of which a thread holds f = lane / 4 and f + 8, and of every 32 columns
4 * quad + i and 16 + 4 * quad + i, where quad = lane % 4. Those are the A operands of m64k32.

    codes    [block 2][columns / 64 2][warp 4][f 8][quad 4][word 4] of 32 bits
    word     columns % 64 / 32, then columns % 32 / 16; byte i; row f low, row f + 8 high
    nibble   2 * code, or -2 * code - 1 of a negative one: the lowest bit is the sign
    scales   bfloat16 [warp 4][f 8][block 2][half 2], of rows f and f + 8 of a block

Which row of the weight that is makes what a thread writes of one token contiguous: with
f = 2 * a + b, of gate and up, row 16 * warp + 4 * a + 2 * half + b of 64; else row
32 * warp + 8 * a + 4 * block + 2 * half + b of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL_ROWS = 128
PANEL_COLUMNS = 128
CODE_BYTES = PANEL_ROWS * PANEL_COLUMNS // 2
PANEL_BYTES = CODE_BYTES + PANEL_ROWS * 2


def panels(n_out: int, *, gated: bool) -> int:
    """Panels along the rows of a weight with `n_out` output columns, the last perhaps half full."""
    return -(-n_out // (PANEL_ROWS // 2 if gated else PANEL_ROWS))


def pack(qdata: Tensor, scale: Tensor, up: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Pack the experts' weights, gate and up together.

    Args:
        qdata: [E, N, K / 2] uint8, two codes a byte, the first in the low half; of gate if `up` is
            given. K is a multiple of 128.
        scale: [E, N, K / 128] bfloat16.
        up: the same of up.

    Returns:
        [E, panels, K / 128, PANEL_BYTES] uint8.
    """
    codes, scales = _rows_of_panels(qdata, up and up[0]), _rows_of_panels(scale, up and up[1])
    E, P, *_ = codes.shape
    blocks = scale.shape[-1]
    packed = torch.empty(E, P, blocks, PANEL_BYTES, dtype=torch.uint8, device=qdata.device)
    for e in range(E):  # an expert at a time: what is made on the way is several times as large
        packed[e, :, :, :CODE_BYTES] = _pack_codes(codes[e], blocks)
        # [P, block, warp, a, half, b, K / 128]
        packed[e, :, :, CODE_BYTES:] = (
            scales[e]
            .permute(0, 6, 2, 3, 5, 1, 4)
            .reshape(P, blocks, -1)
            .contiguous()
            .view(torch.uint8)
        )
    return packed


def _rows_of_panels(x: Tensor, up: Tensor | None) -> Tensor:
    """[E, N, ...] as [E, panels, block, warp, a, half, b, ...], with rows of 0 behind the last."""
    E, N, *rest = x.shape
    P = panels(N, gated=up is not None)
    if up is None:
        rows = _padded(x, P * PANEL_ROWS).view(E, P, 4, 4, 2, 2, 2, *rest)
        return rows.movedim(4, 2)  # was [E, P, warp, a, block, half, b]
    halves = [_padded(part, P * PANEL_ROWS // 2) for part in (x, up)]
    return torch.stack(halves, 1).view(E, 2, P, 4, 4, 2, 2, *rest).movedim(2, 1)


def _padded(x: Tensor, rows: int) -> Tensor:
    """[E, N, ...] with rows of 0 behind the last, `rows` in all."""
    if x.shape[1] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(x.shape[0], rows - x.shape[1], *x.shape[2:])], 1)


def _pack_codes(qdata: Tensor, blocks: int) -> Tensor:
    """[P, block, warp, a, half, b, K / 2] of an expert as [P, K / 128, CODE_BYTES]."""
    codes = torch.stack([qdata & 0xF, qdata >> 4], -1)
    sign = codes >> 3
    codes = ((codes & 7) ^ sign * 7) << 1 | sign
    # K as [K / 128, 64s, 32s, 16s, quad, i]
    parts = codes.view(*qdata.shape[:-1], blocks, 2, 2, 2, 4, 4)
    low, high = parts[:, :, :, :, 0], parts[:, :, :, :, 1]
    # [P, block, warp, a, b, K / 128, 64s, 32s, 16s, quad, i]
    packed = (low | high << 4).permute(0, 5, 1, 6, 2, 3, 4, 9, 7, 8, 10)
    return packed.reshape(qdata.shape[0], blocks, CODE_BYTES)
