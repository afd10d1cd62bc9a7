"""How NVFP4 and MXFP4 weights lie in panels, for products with bfloat16.

8192 bytes of codes, then 1024 (NVFP4) or 512 (MXFP4) of scales, and a factor of each expert's
matrix beside the panels. Rows lie as `moequant.kernels.sm90.panels` says; of every 16 columns a
thread holds 2 * quad, 2 * quad + 1, 2 * quad + 8 and 2 * quad + 9, where quad = lane % 4. Those are
the A operands of m64k16.

    codes    [block 2][columns / 64 2][warp 4][f 8][quad 4][columns % 64 / 16] of 32 bits
    word     see below
    scales   bytes [warp 4][f 8][block 2][half 2][group], of rows f and f + 8 of a block, each 32
             bits of them rotated to the left by 4 (NVFP4) or 7 (MXFP4), so that bytes 0 and 2, and
             after a rotation 1 and 3, lie where bfloat16 has these bits
             NVFP4: five bits of exponent, bias 22, then three of mantissa
             MXFP4: 253 + exponent - the largest of the expert that is not NaN
             NaN: 255, which is NaN (NVFP4) or Inf (MXFP4) to the kernel
    factor   float32 [E, 1], or [E, 2] of gate and up: 2 ** 7 times NVFP4's global scale, or MXFP4's
             largest scale

A group of NVFP4 whose scale is 0 has codes of 0, and one of MXFP4 whose scale is NaN, too: 0 times
Inf is NaN. The sign of an NVFP4 scale is in the codes. Columns behind the last are zeros.

The two codes of a pair of columns are wanted in bits 8 to 6 (magnitude) and 15 (sign) of the halves
of a word, the first low. A word holds four pairs, and a mask leaves those bits of

    row f,     columns 2 * quad:      word
    row f + 8, columns 2 * quad:      word << 6
    row f,     columns 2 * quad + 8:  word << 4 ^ word >> 4
    row f + 8, columns 2 * quad + 8:  word, rotated to the right by 6

All 32 bits of a word follow from these equations. Without the XOR, which is one instruction with
the mask, no four places of those bits share none: a search found none among shifts, rotations and
permutations of bytes.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.errors import DoesNotFitError
from moequant.kernels.sm90.panel_words import (
    CODE_BYTES,
    PANEL_COLUMNS,
    PANEL_ROWS,
    PanelWords,
    every_byte,
    look_up,
)
from moequant.kernels.sm90.panels import pack_panels, unpack_panels, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    Weight = tuple[Tensor, Tensor, Tensor | None]

_UNIT = 128.0
"""What the kernel's product of an NVFP4 code and scale lacks: 2 ** 126 / 2 ** 119."""
_BIAS = 22
# By how much words of scales are rotated to the left, by groups of a block: NVFP4, MXFP4.
_ROTATION = {PANEL_COLUMNS // 16: 4, PANEL_COLUMNS // 32: 7}
# Of (row f or f + 8, columns + 0 or + 8), the places of the bits of the first column's code, the
# lowest first. Those of the second column's code lie 16 further, modulo 32.
_PLACES = {
    (0, 0): (6, 7, 8, 15),
    (1, 0): (0, 1, 2, 9),
    (0, 1): (10, 3, 4, 11),
    (1, 1): (12, 13, 14, 21),
}


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

    Raises:
        DoesNotFitError: a global scale is so large that its factor is none in float32.
    """
    prepared = [_prepare(*weight) for weight in weights]
    codes, scales, factors = zip(*prepared, strict=True)
    return pack_panels(codes, scales, _WORDS), torch.stack(factors, 1)


def unpack(packed: Tensor, factor: Tensor, n_out: int, K: int) -> list[Weight]:
    """The inverse of `pack`.

    Args:
        packed: the panels.
        factor: the factors.
        n_out: rows of a weight.
        K: columns of a weight.
    """
    gated = factor.shape[1] == 2
    weights = unpack_panels(packed, n_out, torch.uint8, _unpack_codes, gated=gated)
    return [
        (qdata[..., : K // 2].contiguous(), *_scales(byte, f, K))
        for (qdata, byte), f in zip(weights, factor.unbind(1), strict=True)
    ]


def _prepare(
    qdata: Tensor, scale: Tensor, global_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, and bytes of scales [E, N, blocks, groups], of whole blocks, and the factor [E]."""
    bits = scale.view(torch.uint8)
    codes = _by_group(qdata, bits.shape[-1])
    if global_scale is None:
        exponent, nan = bits.int(), bits == 255
        largest = exponent.masked_fill(nan, 0).flatten(1).amax(1)
        byte = (253 + exponent - largest[:, None, None]).clamp(min=1)
        byte = _by_block(byte.masked_fill(nan, 255).to(torch.uint8), PANEL_COLUMNS // 32)
        codes = codes.masked_fill(nan[..., None], 0)
        factor = torch.exp2(largest.float() - 127)
    else:
        byte, signs, kept = (look_up(table, bits) for table in _of_e4m3(bits.device))
        byte = _by_block(byte, PANEL_COLUMNS // 16)
        codes = (codes ^ signs[..., None]).bitwise_and_(kept[..., None])
        factor = _factor(global_scale.float())
    qdata = codes.flatten(-2).view(torch.uint8)
    return whole_blocks(qdata, PANEL_COLUMNS // 2), _rotate(byte), factor


def _by_group(qdata: Tensor, groups: int) -> Tensor:
    """[E, N, K / 2] as int64 [E, N, groups, bytes of a group / 8]."""
    if qdata.storage_offset() % 8:  # where no int64 can begin
        qdata = qdata.clone()
    numbers = qdata.contiguous().view(-1).view(torch.int64)
    return numbers.view(*qdata.shape[:-1], groups, qdata.shape[-1] // (8 * groups))


@cache
def _of_e4m3(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """By the bits of an NVFP4 scale: its byte in panels, and what its group's codes, int64, want.

    They are XORed with the second, which has its sign, and masked by the third, 0 for a scale of 0.
    """
    bits = every_byte()
    value = bits.to(torch.uint8).view(torch.float8_e4m3fn).float().abs()
    mantissa, exponent = torch.frexp(value)  # 0.5 to 1
    byte = (exponent - 1 + _BIAS) * 8 + (mantissa * 16 - 8).int()
    byte = torch.where(value == 0, 0, torch.where(value.isnan(), 255, byte)).to(torch.uint8)
    every_sign = -0x7777_7777_7777_7778  # 0x8888_8888_8888_8888
    signs = torch.where(bits < 128, 0, every_sign)
    kept = torch.where(byte == 0, 0, -1)
    return byte.to(device), signs.to(device), kept.to(device)  # copied, as `_tabulate` does


def _factor(global_scale: Tensor) -> Tensor:
    factor = global_scale * _UNIT
    lost = factor.isinf() & global_scale.isfinite()
    if lost.device.type != "meta" and bool(lost.any()):
        expert = int(lost.nonzero()[0])
        raise DoesNotFitError(
            f"the global scale of expert {expert} is {float(global_scale[expert]):.3g}, but panels "
            f"for products with bfloat16 hold less than {2.0**128 / _UNIT:.3g}; name another "
            "backend, such as triton"
        )
    return factor


def _by_block(byte: Tensor, groups: int) -> Tensor:
    """[E, N, K / group] as [E, N, blocks, groups]."""
    byte = whole_blocks(byte, groups)
    return byte.view(*byte.shape[:-1], byte.shape[-1] // groups, groups)


def _rotate(byte: Tensor, *, back: bool = False) -> Tensor:
    """Scales [..., groups of a block] with each four as one word, rotated as in panels, or back."""
    left = _ROTATION[byte.shape[-1]]
    left = 32 - left if back else left
    word = byte.contiguous().view(torch.int32)
    word = word << left | word >> (32 - left) & ((1 << left) - 1)
    return word.view(torch.uint8)


def _scales(byte: Tensor, factor: Tensor, K: int) -> tuple[Tensor, Tensor | None]:
    """Scales and global scale of a weight of K columns, from its bytes and its factor."""
    groups = byte.shape[-1]
    byte = _rotate(byte, back=True)
    byte = byte.flatten(-2)[..., : groups * K // PANEL_COLUMNS].contiguous()
    if groups == PANEL_COLUMNS // 32:
        largest = torch.frexp(factor)[1] - 1 + 127
        exponent = (byte.int() - 253 + largest[:, None, None]).masked_fill(byte == 255, 255)
        return exponent.to(torch.uint8).view(torch.float8_e8m0fnu), None
    value = (1 + (byte & 7).float() / 8) * torch.exp2((byte >> 3).float() - _BIAS)
    value = torch.where(byte == 0, 0.0, torch.where(byte == 255, torch.nan, value))
    return value.to(torch.float8_e4m3fn), factor / _UNIT


def _bits(byte: Tensor, half: int, eight: int) -> Tensor:
    """See `PanelWords.bits`."""
    word = torch.zeros_like(byte)
    for bit, place in enumerate(_PLACES[half, eight]):
        word |= (byte >> bit & 1) << place
        word |= (byte >> (bit + 4) & 1) << (place + 16) % 32
    # What the kernel's XOR adds to the third pair, whose bits 3, 11, 19 and 27 form a chain.
    for mask in (1 << 19, 1 << 11, 0x00100018):
        word ^= word >> 8 & mask
    word ^= word << 8 & 0x04000400
    return word


_WORDS = PanelWords(bits=_bits, quad_stride=1)


def _unpack_codes(packed: Tensor) -> Tensor:
    """See `unpack_panels`."""
    P, blocks, _ = packed.shape
    words = packed.contiguous().view(torch.int32).view(P, blocks, 2, 2, 4, 4, 2, 4, 4)
    words = words.permute(0, 2, 4, 5, 6, 1, 3, 8, 7)  # back from panels
    codes = packed.new_empty(P, 2, 4, 4, 2, 2, blocks, 2, 4, 2, 4)
    pairs = {
        (0, 0): words,
        (1, 0): words << 6,
        (0, 1): words << 4 ^ words >> 4 & 0x0FFFFFFF,
        (1, 1): words >> 6 & 0x03FFFFFF | words << 26,
    }
    for (half, eight), pair in pairs.items():
        first, second = ((x >> 6 & 7 | x >> 12 & 8) for x in (pair, pair >> 16))
        codes[:, :, :, :, half, :, :, :, :, eight] = (first | second << 4).to(torch.uint8)
    return codes.view(P, 2, 4, 4, 2, 2, blocks * PANEL_COLUMNS // 2)
