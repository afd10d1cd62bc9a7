"""How NVFP4 and MXFP4 weights lie in panels, for products with bfloat16.

8192 bytes of codes, then 1024 (NVFP4) or 512 (MXFP4) of scales, and a factor of each expert's
matrix beside the panels. Rows lie as `moequant.kernels.sm90.panels` says; of every 16 columns a
thread holds 2 * quad, 2 * quad + 1, 2 * quad + 8 and 2 * quad + 9, where quad = lane % 4. Those are
the A operands of m64k16.

    codes    [block 2][columns / 64 2][warp 4][f 8][quad 4][columns % 64 / 16] of 32 bits
    word     a half for each column of a pair, the first low; bits of magnitude and sign in a half:
             row f,     columns 2 * quad:      8 to 6, 15
             row f + 8, columns 2 * quad:      5 to 3, 12
             row f,     columns 2 * quad + 8:  2 to 0, 13
             row f + 8, columns 2 * quad + 8: 11 to 9, 14
    scales   bytes [warp 4][f 8][block 2][half 2][group], of rows f and f + 8 of a block
             NVFP4: five bits of exponent, bias 22, then three of mantissa
             MXFP4: 253 + exponent - the largest of the expert
    factor   float32 [E, 1], or [E, 2] of gate and up: 2 ** 7 times NVFP4's global scale, or MXFP4's
             largest scale

A group of NVFP4 whose scale is 0 has codes of 0. Columns behind the last are zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.kernels.sm90.panels import (
    CODE_BYTES,
    PANEL_COLUMNS,
    PANEL_ROWS,
    rows_of_panels,
    rows_of_weights,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    Weight = tuple[Tensor, Tensor, Tensor | None]

_UNIT = 128.0
"""What the kernel's product of an NVFP4 code and scale lacks: 2 ** 126 / 2 ** 119."""
_BIAS = 22
# Lowest bit of the magnitude, and of the sign, of (row f or f + 8, columns + 0 or + 8) in a half.
_PLACES = {(0, 0): (6, 15), (1, 0): (3, 12), (0, 1): (0, 13), (1, 1): (9, 14)}


def panel_bytes(format: str) -> int:
    """Bytes of a panel of nvfp4 or mxfp4."""
    return CODE_BYTES + PANEL_ROWS * PANEL_COLUMNS // (16 if format == "nvfp4" else 32)


def pack(weights: Sequence[Weight]) -> tuple[Tensor, Tensor]:
    """Pack the experts' weights: gate and up together, or one.

    Args:
        weights: of each, codes [E, N, K / 2] uint8, two a byte, the first in the low half; scales
            [E, N, K / 16] float8_e4m3fn and global scale [E] float32 (NVFP4), or [E, N, K / 32]
            float8_e8m0fnu and None (MXFP4).

    Returns:
        [E, panels, ceil(K / 128), panel_bytes] uint8, and the factors [E, weights] float32.
    """
    qdata, _, global_scale = weights[0]
    blocks = -(-qdata.shape[-1] * 2 // PANEL_COLUMNS)
    groups = PANEL_COLUMNS // (32 if global_scale is None else 16)
    prepared = [_prepare(weight, blocks, blocks * groups) for weight in weights]
    codes, scales = (rows_of_panels(*(p[i] for p in prepared)) for i in range(2))
    E, P, *_ = codes.shape
    packed = codes.new_empty(E, P, blocks, CODE_BYTES + PANEL_ROWS * groups)
    for e in range(E):  # an expert at a time: what is made on the way is several times as large
        packed[e, :, :, :CODE_BYTES] = _pack_codes(codes[e], blocks)
        # [P, block, warp, a, half, b, K / 128, group]
        of_blocks = scales[e].view(P, 2, 4, 4, 2, 2, blocks, groups).permute(0, 6, 2, 3, 5, 1, 4, 7)
        packed[e, :, :, CODE_BYTES:] = of_blocks.reshape(P, blocks, -1)
    return packed, torch.stack([factor for *_, factor in prepared], 1)


def unpack(packed: Tensor, factor: Tensor, n_out: int, K: int) -> list[Weight]:
    """The inverse of `pack`.

    Args:
        packed: the panels.
        factor: the factors.
        n_out: rows of a weight.
        K: columns of a weight.
    """
    E, P, blocks, size = packed.shape
    groups = (size - CODE_BYTES) // PANEL_ROWS
    sizes = (P, 2, 4, 4, 2, 2)  # panel, block, warp, a, half, b
    codes = packed.new_empty(E, *sizes, blocks * PANEL_COLUMNS // 2)
    scales = packed.new_empty(E, *sizes, blocks * groups)
    for e in range(E):  # as in `pack`
        codes[e] = _unpack_codes(packed[e, :, :, :CODE_BYTES])
        # [P, K / 128, warp, a, b, block, half, group]
        of_blocks = packed[e, :, :, CODE_BYTES:].reshape(P, blocks, 4, 4, 2, 2, 2, groups)
        scales[e] = of_blocks.permute(0, 5, 2, 3, 6, 4, 1, 7).flatten(-2)
    gated = factor.shape[1] == 2
    parts = zip(
        *(rows_of_weights(t, n_out, gated=gated) for t in (codes, scales)),
        factor.unbind(1),
        strict=True,
    )
    of_row = groups * K // PANEL_COLUMNS
    return [
        (qdata[..., : K // 2].contiguous(), *_scales(byte[..., :of_row].contiguous(), f, groups))
        for qdata, byte, f in parts
    ]


def _prepare(weight: Weight, blocks: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and bytes of scales to whole blocks, and the factor [E]."""
    qdata, scale, global_scale = weight
    pad = torch.nn.functional.pad
    qdata = pad(qdata, (0, blocks * PANEL_COLUMNS // 2 - qdata.shape[-1]))
    missing = groups - scale.shape[-1]
    if global_scale is None:
        exponent = scale.view(torch.uint8).int()
        largest = exponent.flatten(1).amax(1)
        byte = (253 + exponent - largest[:, None, None]).clamp(min=1)
        return qdata, pad(byte.to(torch.uint8), (0, missing)), torch.exp2(largest.float() - 127)
    value = scale.float()
    mantissa, exponent = torch.frexp(value)  # 0.5 to 1
    byte = (exponent - 1 + _BIAS) * 8 + (mantissa * 16 - 8).int()
    byte = torch.where(value == 0, 0, torch.where(value.isnan(), 255, byte)).to(torch.uint8)
    byte = pad(byte, (0, missing))
    qdata = torch.where((byte == 0).repeat_interleave(8, -1), 0, qdata)
    return qdata, byte, global_scale.float() * _UNIT


def _scales(byte: Tensor, factor: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
    """Scales and global scale of a weight from its bytes and its factor."""
    if groups == 4:
        largest = torch.frexp(factor)[1] - 1 + 127
        exponent = byte.int() - 253 + largest[:, None, None]
        return exponent.to(torch.uint8).view(torch.float8_e8m0fnu), None
    value = (1 + (byte & 7).float() / 8) * torch.exp2((byte >> 3).float() - _BIAS)
    value = torch.where(byte == 0, 0.0, torch.where(byte == 255, torch.nan, value))
    return value.to(torch.float8_e4m3fn), factor / _UNIT


def _pack_codes(qdata: Tensor, blocks: int) -> Tensor:
    """[P, block, warp, a, half, b, K / 2] of an expert as [P, K / 128, CODE_BYTES]."""
    # K / 2 as [K / 128, 64s, 16s, 8s, quad], a byte for the two codes of a pair.
    parts = qdata.view(*qdata.shape[:-1], blocks, 2, 4, 2, 4).int()
    word = torch.zeros_like(parts[:, :, :, :, 0, :, :, :, :, 0])
    for (half, eight), (at, sign) in _PLACES.items():
        x = parts[:, :, :, :, half, :, :, :, :, eight]
        word |= (x & 7) << at | (x >> 3 & 1) << sign
        word |= (x >> 4 & 7) << (at + 16) | (x >> 7) << (sign + 16)
    # [P, block, warp, a, b, K / 128, 64s, 16s, quad]
    words = word.permute(0, 5, 1, 6, 2, 3, 4, 8, 7)
    return words.reshape(qdata.shape[0], blocks, -1).view(torch.uint8)


def _unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `_pack_codes`."""
    P, blocks, _ = packed.shape
    words = packed.contiguous().view(torch.int32).view(P, blocks, 2, 2, 4, 4, 2, 4, 4)
    words = words.permute(0, 2, 4, 5, 6, 1, 3, 8, 7)  # as in `_pack_codes`
    codes = packed.new_empty(P, 2, 4, 4, 2, 2, blocks, 2, 4, 2, 4)
    for (half, eight), (at, sign) in _PLACES.items():
        first = words >> at & 7 | (words >> sign & 1) << 3
        second = words >> (at + 16) & 7 | (words >> (sign + 16) & 1) << 3
        codes[:, :, :, :, half, :, :, :, :, eight] = (first | second << 4).to(torch.uint8)
    return codes.view(P, 2, 4, 4, 2, 2, blocks * PANEL_COLUMNS // 2)
