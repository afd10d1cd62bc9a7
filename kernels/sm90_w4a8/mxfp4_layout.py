"""How MXFP4 weights lie in panels, for products with FP8.

8192 bytes of codes, then 512 of scales. Rows, columns and words lie as in int4_layout.py; a word of
codes and the scales differ:

    word    low half: the magnitudes of four codes of row f, four bits each; high half: row f + 8
            bit 8 * i + 7: the sign of code i of row f; bit 8 * i + 3: of row f + 8
    scales  32 bits [warp 4][f 8][block 2][half 2], of rows f and f + 8 of a block
            low half: bfloat16 scale of the row, that of its largest group of 32
            bits 16 + 4 * g: 12 + (exponent of group g) - (the largest), from 1 to 12

The kernel adds the last to the exponents of the E4M3 bytes that it decodes codes to. That is exact,
and has room for eleven octaves between the scales of a row; mxfp4_group_scaled_layout.py is for
weights whose scales are further apart. All panels of a row have its scale, so that products can be
summed before they are scaled. A group of zeros has no scale here; `unpack` gives it 1, as the
format does. Columns behind the last are zeros.

Units of more than 64 rows sum over all columns in the tensor cores, whose sums have about 14 bits:
by the model in sm90_fp8_channel_fused.py, the error relative to the result is then 2.0e-3 with 7168
columns. That of activations rounded to FP8 is 2.6e-2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.errors import DoesNotFitError
from moequant.kernels.sm90.panel_words import CODE_BYTES, PANEL_COLUMNS, PANEL_ROWS, PanelWords
from moequant.kernels.sm90.panels import pack_panels, unpack_panels, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

PANEL_BYTES = CODE_BYTES + PANEL_ROWS * 4
_LARGEST = 12
_ONE = 127  # the E8M0 byte of 1


def pack(weights: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Pack the experts' weights.

    Args:
        weights: by projection, gate and up, or one; of each, codes [E, N, K / 2] uint8, two a byte,
            the first in the low half, and scales [E, N, K / 32] float8_e8m0fnu. K is a multiple of
            32.

    Returns:
        [E, panels, ceil(K / 128), PANEL_BYTES] uint8.

    Raises:
        DoesNotFitError: the scales of a row lie more than eleven octaves apart; the message names
            the projection and the expert.
    """
    codes, scales = [], []
    for projection, (qdata, scale) in weights.items():
        codes.append(whole_blocks(qdata, PANEL_COLUMNS // 2))
        scales.append(_scale_words(codes[-1], scale, projection)[..., None])
    return pack_panels(codes, scales, WORDS)


def unpack(packed: Tensor, n_out: int, K: int, *, gated: bool) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `pack`: codes [E, n_out, K / 2] and scales [E, n_out, K / 32].

    Args:
        packed: [E, panels, ceil(K / 128), PANEL_BYTES] uint8.
        n_out: rows of the weight, or of gate and of up each.
        K: columns of the weight.
        gated: whether the panels hold gate and up.

    Returns:
        Those of the weight, or those of gate and then those of up.
    """
    weights = unpack_panels(packed, n_out, torch.int32, unpack_codes, gated=gated)
    return [_weight(qdata, words[..., 0], K) for qdata, words in weights]


def _used(qdata: Tensor) -> Tensor:
    """[E, N, blocks, 4] bool: the groups of 32 columns that are not zeros."""
    *rows, row_bytes = qdata.shape
    used: Tensor = (qdata & 0x77).bool().view(*rows, row_bytes // 64, 4, 16)
    return used.any(-1)


def _scale_words(qdata: Tensor, scale: Tensor, projection: str) -> Tensor:
    """The words of scales, int32 [E, N, blocks], of codes that fill their blocks."""
    used = _used(qdata)
    if used.device.type == "meta":
        return used.new_empty(used.shape[:-1], dtype=torch.int32)
    exponent = whole_blocks(scale.view(torch.uint8), 4).view(used.shape).int()
    exponent = torch.where(used, exponent, 0)
    largest = exponent.amax((-2, -1))[..., None]
    shift = torch.where(used, _LARGEST + exponent - largest[..., None], 1)
    _check_distances(_LARGEST - shift, projection)
    # bfloat16 bits of 2 ** (largest - 127): subnormal for 0, NaN for 255.
    word = torch.where(largest == 0, 0x40, torch.where(largest == 255, 0x7FC0, largest << 7))
    for group in range(4):
        word = word | shift[..., group] << (16 + 4 * group)
    return word


def _check_distances(octaves: Tensor, projection: str) -> None:
    """Check how far the scales [E, N, blocks, 4] of groups are below the largest of their row.

    Raises:
        DoesNotFitError: further than the kernel can shift; names the first expert.
    """
    if octaves.numel() == 0 or int(octaves.max()) < _LARGEST:
        return
    furthest = octaves.flatten(1).amax(1)
    expert = int((furthest >= _LARGEST).nonzero()[0])
    raise DoesNotFitError(
        f"{projection} of expert {expert}: the scales of a row lie {int(furthest[expert])} octaves "
        f"apart, but at most {_LARGEST - 1} can be folded into "
        "codes; pack them with a scale for each group"
    )


def _weight(qdata: Tensor, words: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Codes and E8M0 scales of a weight of K columns, from whole blocks."""
    bits = words & 0xFFFF
    largest = torch.where(bits == 0x40, 0, torch.where(bits == 0x7FC0, 255, bits >> 7))
    shift = torch.stack([words >> (16 + 4 * group) & 15 for group in range(4)], -1)
    used = _used(qdata)
    exponent = torch.where(used, largest[..., None] + shift - _LARGEST, _ONE).flatten(-2)
    scale = exponent[..., : K // 32].to(torch.uint8).contiguous().view(torch.float8_e8m0fnu)
    return qdata[..., : K // 2].contiguous(), scale


def _bits(byte: Tensor, half: int, which: int) -> Tensor:
    """See `PanelWords.bits`: of codes 2 * which and 2 * which + 1."""
    word = (byte & 0x77) << 8 * which + 16 * half
    for i in range(2):
        word |= (byte >> (4 * i + 3) & 1) << 8 * (2 * which + i) + 7 - 4 * half
    return word


WORDS = PanelWords(bits=_bits, quad_stride=2)
"""The words of codes."""


def unpack_codes(packed: Tensor) -> Tensor:
    """See `unpack_panels`."""
    P, blocks, _ = packed.shape
    words = packed.contiguous().view(torch.int32).view(P, blocks, 2, 2, 4, 4, 2, 4, 2, 2)
    words = words.permute(0, 2, 4, 5, 6, 1, 3, 8, 9, 7)
    rows = []
    for half in range(2):
        codes = words >> (16 * half) & 0x7777
        for i in range(4):
            codes = codes | (words >> (8 * i + 7 - 4 * half) & 1) << (4 * i + 3)
        rows.append(torch.stack([codes & 0xFF, codes >> 8 & 0xFF], -1))
    codes = torch.stack(rows, 4).to(torch.uint8)  # half between a and b
    return codes.reshape(P, 2, 4, 4, 2, 2, blocks * PANEL_COLUMNS // 2)
