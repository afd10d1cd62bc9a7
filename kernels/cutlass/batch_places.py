"""Where the rows of batches lie, for kernels that read a routing: C rows an expert, the first used.

A batch is a routing whose pair p = e * C + i is token i of expert e, in row p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moequant.kernels.block_scaled_quantize import TILE_ROWS, ScalePlaces
from moequant.kernels.cutlass.batch_tiles import batch_tiles
from moequant.kernels.launch import launch, overlaps_launches, wait_for_inputs
from moequant.kernels.routing import TILE_FIELDS, SortedRouting

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_PLACED_ROWS = 128
"""Rows of a program."""


def place_batches(
    counts: Tensor, capacity: int, *, empty: Callable[..., Tensor]
) -> tuple[SortedRouting, ScalePlaces]:
    """The routing that batches are, cut into tiles of TILE_ROWS, and where their scales lie.

    Scales of the rows in use lie as `place_scales` puts them: those of each expert start at the
    next multiple of 128. So tile i of the work list has tile i of the scales. Two launches.

    Args:
        counts: [E] int32, at least 0; more than `capacity` counts as that.
        capacity: C, at least 1.
        empty: makes a tensor of a shape and `dtype`, on the device of `counts`.

    Returns:
        The routing, with nothing in `counts`, and -1 for the rows that are not in use; and the
        places.
    """
    E = counts.shape[0]
    rows = E * capacity

    def ints(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int32)

    routing = SortedRouting(
        pair_of_row=ints(rows),
        row_of_pair=ints(rows),
        row_end=ints(E),
        tiles=ints(E * -(-capacity // TILE_ROWS), TILE_FIELDS),
        tile_count=ints(1),
        units_taken=ints(0),
        counts=ints(0),
    )
    places = ScalePlaces.allocate(rows, E, empty=empty)
    batch_tiles(
        counts,
        routing.tiles,
        routing.tile_count,
        capacity=capacity,
        tile_rows=TILE_ROWS,
    )
    overlap = overlaps_launches(counts.device)
    launch(
        place_batch_rows,
        (triton.cdiv(rows, _PLACED_ROWS),),
        counts,
        routing.pair_of_row,
        routing.row_of_pair,
        routing.row_end,
        places.expert_offsets,
        places.scale_offsets,
        places.scale_row_of_pair,
        places.expert_of_pair,
        capacity,
        E=E,
        E_PAD=triton.next_power_of_2(E),
        TILE=TILE_ROWS,
        CHUNK=_PLACED_ROWS,
        OVERLAP=overlap,
        num_warps=4,
        overlap=overlap,
    )
    return routing, places


@triton.jit
def place_batch_rows(
    counts,
    pair_of_row,
    row_of_pair,
    row_end,
    expert_offsets,
    scale_offsets,
    scale_row_of_pair,
    expert_of_pair,
    capacity,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: the places of CHUNK rows; program 0 writes the experts' offsets too."""
    wait_for_inputs(OVERLAP)
    bins = tl.arange(0, E_PAD)
    used = tl.minimum(tl.load(counts + bins, mask=bins < E, other=0), capacity)
    room = tl.cdiv(used, TILE) * TILE
    offset = tl.cumsum(room, 0) - room
    end = bins * capacity + used
    if tl.program_id(0) == 0:
        tl.store(row_end + bins, end, mask=bins < E)
        tl.store(expert_offsets + bins, bins * capacity, mask=bins < E)
        tl.store(expert_offsets + E, tl.max(tl.where(bins < E, end, 0), 0))
        tl.store(scale_offsets + bins, offset, mask=bins < E)
        tl.store(scale_offsets + E, tl.sum(room, 0))
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = row // capacity
    inside = expert < E
    place = row - expert * capacity
    of = tl.minimum(expert, E_PAD - 1)
    live = inside & (place < tl.gather(used, of, 0))
    same = tl.where(live, row, -1)
    tl.store(pair_of_row + row, same, mask=inside)
    tl.store(row_of_pair + row, same, mask=inside)
    tl.store(expert_of_pair + row, expert, mask=inside)
    tl.store(scale_row_of_pair + row, tl.gather(offset, of, 0) + place, mask=live)
