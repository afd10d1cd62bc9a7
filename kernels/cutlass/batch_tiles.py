"""The work list of batches: C rows an expert, of which the first few are in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.launch import launch, overlaps_launches, wait_for_inputs
from moequant.kernels.routing import TILE_FIELDS, write_tiles

if TYPE_CHECKING:
    from torch import Tensor


def batch_tiles(
    counts: Tensor,
    tiles: Tensor,
    tile_count: Tensor,
    *,
    capacity: int,
    tile_rows: int,
) -> None:
    """Cut the rows in use into tiles, as `sort_routing` does; one launch.

    Args:
        counts: [E] int32, at least 0; more than `capacity` counts as that.
        tiles: [E * ceil(capacity / tile_rows), TILE_FIELDS] int32, written.
        tile_count: [1] int32, written.
        capacity: C; expert e has rows e * C on.
        tile_rows: most rows of a tile.
    """
    E = counts.shape[0]
    overlap = overlaps_launches(counts.device)
    launch(
        write_batch_tiles,
        (1,),
        counts,
        tiles,
        tile_count,
        capacity,
        E=E,
        E_PAD=triton.next_power_of_2(E),
        TILE_ROWS=tile_rows,
        FIELDS=TILE_FIELDS,
        OVERLAP=overlap,
        num_warps=4,
        overlap=overlap,
    )


@triton.jit
def write_batch_tiles(
    counts,
    tiles,
    tile_count,
    capacity,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program."""
    wait_for_inputs(OVERLAP)
    e = tl.arange(0, E_PAD)
    total = tl.minimum(tl.load(counts + e, mask=e < E, other=0), capacity)
    write_tiles(tiles, tile_count, e * capacity, total, e, TILE_ROWS, 0, FIELDS)
