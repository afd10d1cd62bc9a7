"""Decode a weight in row tiles whose temporaries fit a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats.base import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moequant.formats.base import Format


_TILE_ELEMENTS = 1 << 18
_TILE_COPIES = 8
"""Float32 copies of a tile that decoding and comparing it need."""


def tile_rows(K: int, multiple: int) -> int:
    """Rows of a tile of a weight with K columns: whole blocks of `multiple` rows."""
    return max(1, _TILE_ELEMENTS // (max(K, 1) * multiple)) * multiple


def tile_bytes(K: int, multiple: int) -> int:
    """Upper bound of the temporary memory for decoding such a tile."""
    return _TILE_COPIES * tile_rows(K, multiple) * K * torch.float32.itemsize


def row_tiles(
    q: QuantizedWeight, format: Format, multiple: int
) -> Iterator[tuple[slice, QuantizedWeight]]:
    """Split a weight [N, K] of `format` into pairs of row range and tile; tiles are views."""
    N, K = q.shape
    block_n = format.block[0]
    step = tile_rows(K, multiple)
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        yield (
            rows,
            QuantizedWeight(
                format=q.format,
                qdata=q.qdata[rows],
                scale=q.scale[start // block_n : -(-rows.stop // block_n)],
                global_scale=q.global_scale,
                shape=torch.Size((rows.stop - start, K)),
            ),
        )


def dequantize_into(q: QuantizedWeight, format: Format, out: Tensor) -> None:
    """Decode a weight [N, K] into `out` [N, K], rounded to its floating-point dtype."""
    for rows, tile in row_tiles(q, format, format.block[0]):
        out[rows] = format.dequantize(tile)
