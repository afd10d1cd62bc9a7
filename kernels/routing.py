"""Sort the M * T pairs of a routing by expert, on the device, without atomics.

Pair m * T + t is the t-th choice of token m. Rows are pairs in the order of their expert and,
within one, of the pair, so the order is the same from run to run. Each expert's rows start at a
multiple of `alignment`. Tiles are runs of at most `tile_rows` rows of one expert: the work list of
the grouped GEMMs.

One launch up to ONE_LAUNCH_PAIRS pairs: every program counts all of them by itself. Above, a first
launch counts per chunk. A pair's place within its chunk and expert is the number of equal experts
before it, found by comparing the expert of each pair with that of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from moequant.kernels.calls import MAX_PAIRS
from moequant.kernels.launch import Relaunch, launch, overlaps_launches, wait_for_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TILE_FIELDS = 4
"""int32 words of a tile: expert, first row, rows, and the expert's first tile | tiles << 16."""

ONE_LAUNCH_PAIRS = 4096
_CHUNKS = ((32768, 256), (MAX_PAIRS, 512))
"""Pairs of a program, up to so many in all: it reads the counts of every other."""


def max_tiles(pairs: int, experts: int, tile_rows: int) -> int:
    """The most tiles that any routing of `pairs` pairs makes."""
    if pairs <= experts:
        return pairs
    return experts + (pairs - experts) // tile_rows


def max_rows(pairs: int, experts: int, alignment: int) -> int:
    """The most rows, gaps included, that any routing of `pairs` pairs fills."""
    return (pairs + min(pairs, experts) * (alignment - 1)) // alignment * alignment


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """How rows lie in groups, one an expert, and are cut into tiles.

    Attributes:
        experts: E here.
        tile_rows: most rows of a tile, but for `extra_rows`.
        alignment: of each expert's first row.
        extra_rows: where an expert would have a last tile of at most so many rows behind others,
            the tile in front of it has them too.
    """

    experts: int
    tile_rows: int
    alignment: int = 1
    extra_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class SortedRouting:
    """Where the pairs of a routing lie, and the work list over them.

    Attributes:
        pair_of_row: [max_rows] int32; gaps between experts are not written.
        row_of_pair: [M * T] int32, -1 where the expert is not here.
        row_end: [E] int32, the row behind the last of each expert (DeepGEMM's psum layout).
        tiles: [max_tiles, TILE_FIELDS] int32; those from `tile_count` on are not written.
        tile_count: [1] int32.
        units_taken: [2] int32, set to 0 by every sort: the GEMMs' work counters.
        counts: [chunks, E_pad] int32 scratch of the two-launch sort.
    """

    pair_of_row: Tensor
    row_of_pair: Tensor
    row_end: Tensor
    tiles: Tensor
    tile_count: Tensor
    units_taken: Tensor
    counts: Tensor

    @staticmethod
    def allocate(pairs: int, grouping: Grouping, *, empty: Callable[..., Tensor]) -> SortedRouting:
        """Room for any routing of `pairs` pairs; not initialized.

        Args:
            pairs: how many.
            grouping: how they will be sorted.
            empty: makes a tensor of a shape and `dtype`, such as `WorkspaceArena.empty`.
        """

        def ints(*shape: int) -> Tensor:
            return empty(*shape, dtype=torch.int32)

        experts = grouping.experts
        return SortedRouting(
            pair_of_row=ints(max_rows(pairs, experts, grouping.alignment)),
            row_of_pair=ints(pairs),
            row_end=ints(experts),
            tiles=ints(max_tiles(pairs, experts, grouping.tile_rows), TILE_FIELDS),
            tile_count=ints(1),
            units_taken=ints(2),
            counts=ints(chunks(pairs), triton.next_power_of_2(experts)),
        )


def map_size(expert_map: Tensor | None) -> int:
    """Ids that `expert_map` knows; -1 where there is none, and ids are indices."""
    return -1 if expert_map is None else expert_map.shape[0]


def chunk_of(pairs: int) -> int:
    """Pairs that a program places, of `pairs` in all."""
    return next(chunk for most, chunk in _CHUNKS if pairs <= most)


def chunks(pairs: int) -> int:
    """Programs that place `pairs` pairs."""
    return -(-pairs // chunk_of(pairs))


def sort_kernel(pairs: int) -> int:
    """Equal for numbers of pairs, at least 1, that the same compiled kernels sort."""
    return (pairs - 1).bit_length() if pairs <= ONE_LAUNCH_PAIRS else chunk_of(pairs)


def likely_tile_rows(mean: float, tile_rows: Sequence[int]) -> int:
    """The least of `tile_rows` that nearly all experts fit in, else the largest.

    Args:
        mean: rows an expert has; with uniform routing they scatter by its square root, of which two
            are added.
        tile_rows: rows of the tiles to choose from, ascending.
    """
    likely = mean + 2 * mean**0.5
    return next((rows for rows in tile_rows if likely <= rows), tile_rows[-1])


def sort_routing(
    topk_ids: Tensor, out: SortedRouting, grouping: Grouping, *, expert_map: Tensor | None = None
) -> Relaunch | None:
    """Sort `topk_ids` [M, T] int32 or int64 contiguous into `out`.

    Ids outside 0 to E - 1 (after `expert_map`, [global experts] int32 or int64) have no row.

    Returns:
        Of a single launch, see `launch`: its first arguments are `topk_ids`, and `expert_map` or
        again `topk_ids`. None of several.
    """
    pairs = topk_ids.numel()
    if pairs == 0:
        return None
    count_chunks(topk_ids, out, grouping, expert_map)
    arguments, constants = placing(topk_ids, out, grouping, expert_map)
    overlap = overlaps_launches(topk_ids.device)
    placed = launch(
        place_pairs,
        (chunks(pairs),),
        *arguments,
        **constants,
        OVERLAP=overlap,
        num_warps=8,
        overlap=overlap,
    )
    return placed if pairs <= ONE_LAUNCH_PAIRS else None


def count_chunks(
    topk_ids: Tensor, out: SortedRouting, grouping: Grouping, expert_map: Tensor | None
) -> None:
    """The first of two launches, which counts per chunk; nothing where there is one alone."""
    pairs = topk_ids.numel()
    if pairs <= ONE_LAUNCH_PAIRS:
        return
    overlap = overlaps_launches(topk_ids.device)
    launch(
        count_experts,
        (chunks(pairs),),
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        out.counts,
        pairs,
        E=grouping.experts,
        E_PAD=out.counts.shape[1],
        CHUNK=chunk_of(pairs),
        MAP_SIZE=map_size(expert_map),
        OVERLAP=overlap,
        num_warps=4,
        overlap=overlap,
    )


def placing(
    topk_ids: Tensor, out: SortedRouting, grouping: Grouping, expert_map: Tensor | None
) -> tuple[tuple[Tensor | int, ...], dict[str, int]]:
    """What `place_chunk` takes behind the chunk: arguments, and constexpr by name."""
    pairs = topk_ids.numel()
    ids_map = topk_ids if expert_map is None else expert_map
    arguments = (
        topk_ids, ids_map, out.counts, out.pair_of_row, out.row_of_pair, out.row_end, out.tiles,
        out.tile_count, out.units_taken, pairs,
    )  # fmt: skip
    return arguments, {
        "E": grouping.experts,
        "E_PAD": out.counts.shape[1],
        "CHUNK": chunk_of(pairs),
        "PAIRS_PAD": triton.next_power_of_2(pairs) if pairs <= ONE_LAUNCH_PAIRS else 0,
        "ALIGNMENT": grouping.alignment,
        "TILE_ROWS": grouping.tile_rows,
        "EXTRA_ROWS": grouping.extra_rows,
        "FIELDS": TILE_FIELDS,
        "MAP_SIZE": map_size(expert_map),
    }


@triton.jit
def local_expert(topk_ids, expert_map, pair, mask, E: tl.constexpr, MAP_SIZE: tl.constexpr):
    """Index here of the expert of `pair`, or E where there is none.

    Ids are compared as they are, before int64 is narrowed, and before the map is read: one out of
    range is no expert, and reads nothing.
    """
    expert = tl.load(topk_ids + pair, mask=mask, other=-1)
    if MAP_SIZE >= 0:
        known = (expert >= 0) & (expert < MAP_SIZE)
        expert = tl.load(expert_map + expert, mask=mask & known, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def count_experts(
    topk_ids,
    expert_map,
    counts,
    pairs,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Pairs of each expert in this program's chunk."""
    wait_for_inputs(OVERLAP)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = local_expert(topk_ids, expert_map, pair, pair < pairs, E, MAP_SIZE)
    found = tl.histogram(tl.minimum(expert, E_PAD - 1), E_PAD, mask=expert < E)
    tl.store(counts + chunk * E_PAD + tl.arange(0, E_PAD), found)


@triton.jit
def place_pairs(
    topk_ids,
    expert_map,
    counts,
    pair_of_row,
    row_of_pair,
    row_end,
    tiles,
    tile_count,
    units_taken,
    pairs,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows of this program's chunk of pairs; program 0 writes the experts' ends and the tiles."""
    wait_for_inputs(OVERLAP)
    place_chunk(
        tl.program_id(0), topk_ids, expert_map, counts, pair_of_row, row_of_pair, row_end, tiles,
        tile_count, units_taken, pairs, E, E_PAD, CHUNK, PAIRS_PAD, ALIGNMENT, TILE_ROWS,
        EXTRA_ROWS, FIELDS, MAP_SIZE,
    )  # fmt: skip


@triton.jit
def place_chunk(
    chunk,
    topk_ids,
    expert_map,
    counts,
    pair_of_row,
    row_of_pair,
    row_end,
    tiles,
    tile_count,
    units_taken,
    pairs,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAP_SIZE: tl.constexpr,
):
    """The body of `place_pairs` for one chunk."""
    bins = tl.arange(0, E_PAD)
    if PAIRS_PAD > 0:
        every = tl.arange(0, PAIRS_PAD)
        of = local_expert(topk_ids, expert_map, every, every < pairs, E, MAP_SIZE)
        bin_of = tl.minimum(of, E_PAD - 1)
        total = tl.histogram(bin_of, E_PAD, mask=of < E)
        before = tl.histogram(bin_of, E_PAD, mask=(of < E) & (every < chunk * CHUNK))
    else:
        total = tl.zeros([E_PAD], tl.int32)
        before = tl.zeros([E_PAD], tl.int32)
        # 64 chunks at a time, as registers allow.
        chunks = (pairs + CHUNK - 1) // CHUNK
        for first in range(0, chunks, 64):
            row = first + tl.arange(0, 64)[:, None]
            used = row < chunks
            found = tl.load(counts + row * E_PAD + bins[None, :], mask=used, other=0)
            total += tl.sum(found, 0)
            before += tl.sum(tl.where(row < chunk, found, 0), 0)
    room = (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    start = tl.cumsum(room, 0) - room
    if chunk == 0:
        tl.store(row_end + bins, start + total, mask=bins < E)
        write_tiles(tiles, tile_count, start, total, bins, TILE_ROWS, EXTRA_ROWS, FIELDS)
        tl.store(units_taken + tl.arange(0, 2), tl.zeros([2], tl.int32))
    index = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + index
    expert = local_expert(topk_ids, expert_map, pair, pair < pairs, E, MAP_SIZE)
    rank = tl.zeros([CHUNK], tl.int32)
    for first in tl.static_range(0, CHUNK, 32):
        across = first + tl.arange(0, 32)
        other_pair = chunk * CHUNK + across
        other = local_expert(topk_ids, expert_map, other_pair, other_pair < pairs, E, MAP_SIZE)
        same = (expert[:, None] == other[None, :]) & (across[None, :] < index[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    here = (expert < E) & (pair < pairs)
    row = tl.gather(start + before, tl.minimum(expert, E_PAD - 1), 0) + rank
    tl.store(pair_of_row + row, pair, mask=here)
    tl.store(row_of_pair + pair, tl.where(here, row, -1), mask=pair < pairs)


@triton.jit
def write_tiles(
    tiles,
    tile_count,
    start,
    total,
    bins,
    TILE_ROWS: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Cut each expert's `total` rows from `start` on into tiles: see `Grouping`."""
    whole = total // TILE_ROWS
    rest = total - whole * TILE_ROWS
    needed = whole + (rest > tl.where(whole > 0, EXTRA_ROWS, 0)).to(tl.int32)
    end = tl.cumsum(needed, 0)
    tl.store(tile_count, tl.sum(needed, 0))
    first = tiles + (end - needed) * FIELDS
    for i in range(tl.max(needed, 0)):
        live = i < needed
        row = i * TILE_ROWS
        rows = tl.where(i == needed - 1, total - row, TILE_ROWS)
        tl.store(first + i * FIELDS, bins, mask=live)
        tl.store(first + i * FIELDS + 1, start + row, mask=live)
        tl.store(first + i * FIELDS + 2, rows, mask=live)
        tl.store(first + i * FIELDS + 3, (end - needed) | (needed << 16), mask=live)
