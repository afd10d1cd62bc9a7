"""The 128x4 tiles in which SM100 tensor cores, CUTLASS and cuBLASLt read block scales.

One-byte scales [R, C] (NVFP4: E4M3, C = K / 16; MXFP4: E8M0, C = K / 32) are padded with zero
bytes to [Rp, Cp], Rp a multiple of 128 and Cp of 4, and cut into tiles of 128x4 that lie row-major,
512 bytes each. Within a tile, rows 32 apart lie side by side:

    offset(r, c) = 512 * ((r // 128) * (Cp // 4) + c // 4)
                 +  16 * (r % 32)  +  4 * (r // 32 % 4)  +  c % 4

The padding decodes to 0 (E4M3) or 2**-127 (E8M0): finite, so it cannot make a NaN.

Sources: cuBLAS documentation, "1D Block Scaling Factors Layout"; CUTLASS `Sm1xxBlockScaledConfig`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moequant.errors import CheckpointError, UnsupportedError
from moequant.layouts.arguments import check_extents, check_matrices

_TILE_ROWS, _TILE_COLS = 128, 4


def swizzled_shape(rows: int, cols: int) -> tuple[int, int]:
    """Last two dimensions of the swizzled form of scales [..., rows, cols]."""
    return -(-rows // _TILE_ROWS) * _TILE_ROWS, -(-cols // _TILE_COLS) * _TILE_COLS


def swizzle(scale: Tensor) -> Tensor:
    """Reorder scales into 128x4 tiles, each matrix of a batch separately.

    Args:
        scale: [..., R, C] of any one-byte dtype.

    Returns:
        [..., ceil128(R), ceil4(C)] of the same dtype, contiguous. The shape gives the size
        only: element [r, c] is at the offset above, not at row r, column c.

    Raises:
        UnsupportedError: `scale` is no tensor of that shape, or an element of it not one byte.
    """
    check_matrices("scale", scale, "[..., R, C]")
    if scale.element_size() != 1:
        raise UnsupportedError(f"the 128x4 layout holds one-byte scales, not {scale.dtype}")
    *lead, rows, cols = scale.shape
    padded_rows, padded_cols = swizzled_shape(rows, cols)
    # Through uint8: torch does not pad every float8 dtype.
    padded = torch.nn.functional.pad(
        scale.view(torch.uint8), (0, padded_cols - cols, 0, padded_rows - rows)
    )
    # [row tile, r // 32 % 4, r % 32, column tile, c % 4]; the layout swaps the second and fourth.
    tiles = padded.reshape(*lead, padded_rows // 128, 4, 32, padded_cols // 4, 4)
    swizzled = _swap_in_words(tiles).reshape(*lead, padded_rows, padded_cols)
    return swizzled.view(scale.dtype)


def unswizzle(swizzled: Tensor, rows: int, cols: int, *, name: str = "scale") -> Tensor:
    """Inverse of `swizzle`.

    Args:
        swizzled: [..., ceil128(rows), ceil4(cols)] of any one-byte dtype.
        rows: R of the scales.
        cols: C of the scales.
        name: what errors call the tensor.

    Returns:
        [..., rows, cols] of the same dtype, contiguous.

    Raises:
        CheckpointError: the shape is not that of [rows, cols] swizzled, or a padding byte is not
            zero; the tensor was made from other scales, or damaged.
        UnsupportedError: `swizzled` is no tensor of two or more dimensions, an element of it not
            one byte, or `rows` or `cols` no extent.
    """
    check_extents(rows=rows, cols=cols)
    check_matrices(name, swizzled, f"[..., {', '.join(map(str, swizzled_shape(rows, cols)))}]")
    if swizzled.element_size() != 1:
        raise UnsupportedError(
            f"{name}: the 128x4 layout holds one-byte scales, not {swizzled.dtype}"
        )
    expected = swizzled_shape(rows, cols)
    if swizzled.shape[-2:] != expected:
        raise CheckpointError(
            f"{name}: swizzled scales are {list(swizzled.shape[-2:])}, but {[rows, cols]} make "
            f"{list(expected)}; prepare the checkpoint again"
        )
    *lead, padded_rows, padded_cols = swizzled.shape
    # [row tile, column tile, r % 32, r // 32 % 4, c % 4]
    tiles = swizzled.view(torch.uint8).reshape(
        *lead, padded_rows // 128, padded_cols // 4, 32, 4, 4
    )
    padded = _swap_in_words(tiles).reshape(swizzled.shape)
    if padded[..., rows:, :].any() or padded[..., cols:].any():
        raise CheckpointError(
            f"{name}: a padding byte of the 128x4 layout is not zero, so these are not scales of "
            f"shape {[rows, cols]}; prepare the checkpoint again"
        )
    return padded[..., :rows, :cols].contiguous().view(swizzled.dtype)


def _swap_in_words(tiles: Tensor) -> Tensor:
    """Swap axes -4 and -2 of uint8 [..., 4], whose last four bytes move as one int32."""
    # clone, because contiguous() may return the tensor itself, at an offset that is not a multiple
    # of 4, which an int32 view needs.
    words = tiles.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return words.transpose(-4, -2).contiguous().view(torch.uint8)
