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


def unpack(packed: Tensor, n_out: int, *, gated: bool) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `pack`: codes [E, n_out, K / 2] and scales [E, n_out, K / 128].

    Args:
        packed: [E, panels, K / 128, PANEL_BYTES] uint8.
        n_out: rows of the weight, or of gate and of up each.
        gated: whether the panels hold gate and up.

    Returns:
        Those of the weight, or those of gate and then those of up.
    """
    E, P, blocks, _ = packed.shape
    sizes = (P, 2, 4, 4, 2, 2)  # panel, block, warp, a, half, b
    codes = packed.new_empty(E, *sizes, blocks * PANEL_COLUMNS // 2)
    scales = packed.new_empty(E, *sizes, blocks, dtype=torch.bfloat16)
    for e in range(E):  # as in `pack`
        codes[e] = _unpack_codes(packed[e, :, :, :CODE_BYTES])
        # [P, K / 128, warp, a, b, block, half]
        scale = packed[e, :, :, CODE_BYTES:].contiguous().view(torch.bfloat16)
        scales[e] = scale.view(P, blocks, 4, 4, 2, 2, 2).permute(0, 5, 2, 3, 6, 4, 1)
    parts = (_rows_of_weights(t, n_out, gated=gated) for t in (codes, scales))
    return list(zip(*parts, strict=True))


def _rows_of_panels(x: Tensor, up: Tensor | None) -> Tensor:
    """[E, N, ...] as [E, panels, block, warp, a, half, b, ...], with rows of 0 behind the last."""
    E, N, *rest = x.shape
    P = panels(N, gated=up is not None)
    if up is None:
        rows = _padded(x, P * PANEL_ROWS).view(E, P, 4, 4, 2, 2, 2, *rest)
        return rows.movedim(4, 2)  # was [E, P, warp, a, block, half, b]
    halves = [_padded(part, P * PANEL_ROWS // 2) for part in (x, up)]
    return torch.stack(halves, 1).view(E, 2, P, 4, 4, 2, 2, *rest).movedim(2, 1)


def _rows_of_weights(x: Tensor, n_out: int, *, gated: bool) -> list[Tensor]:
    """The inverse of `_rows_of_panels`, a tensor of each weight."""
    E, P, *_, columns = x.shape
    if gated:
        halves = x.movedim(1, 2).reshape(E, 2, P * PANEL_ROWS // 2, columns)
    else:
        halves = x.movedim(2, 4).reshape(E, 1, P * PANEL_ROWS, columns)
    return [half[:, :n_out].contiguous() for half in halves.unbind(1)]


def _padded(x: Tensor, rows: int) -> Tensor:
    """[E, N, ...] with rows of 0 behind the last, `rows` in all."""
    if x.shape[1] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(x.shape[0], rows - x.shape[1], *x.shape[2:])], 1)


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
