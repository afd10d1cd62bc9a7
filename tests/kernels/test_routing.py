from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.launch import INTERPRETED
from moequant.kernels.routing import (
    ONE_LAUNCH_PAIRS,
    Grouping,
    SortedRouting,
    likely_tile_rows,
    max_rows,
    max_tiles,
    sort_routing,
)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def experts_here(ids, experts, expert_map):
    """Index here of every pair's expert, or -1, in plain Python."""
    known = expert_map.tolist() if expert_map is not None else range(experts)
    here = [known[i] if 0 <= i < len(known) else -1 for i in ids.flatten().tolist()]
    return torch.tensor([e if 0 <= e < experts else -1 for e in here], dtype=torch.int64)


def cut(total, rows, extra):
    """Rows of the tiles of an expert with `total` rows."""
    tiles = [min(rows, total - i) for i in range(0, total, rows)]
    if len(tiles) > 1 and tiles[-1] <= extra:
        tiles[-2:] = [sum(tiles[-2:])]
    return tiles


def check(ids, experts, alignment, tile_rows, expert_map=None, *, extra_rows=0):
    grouping = Grouping(
        experts=experts, alignment=alignment, tile_rows=tile_rows, extra_rows=extra_rows
    )
    out = SortedRouting.allocate(ids.numel(), grouping, empty=partial(torch.empty, device=DEVICE))
    for t in (out.pair_of_row, out.row_of_pair, out.row_end, out.tiles, out.tile_count, out.counts):
        t.fill_(-77)
    sort_routing(
        ids.to(DEVICE),
        out,
        grouping,
        expert_map=None if expert_map is None else expert_map.to(DEVICE),
    )
    here = experts_here(ids, experts, expert_map)
    start, rows, tiles, ends = 0, {}, [], []
    row_of_pair = torch.full_like(here, -1)
    for e in range(experts):
        pairs = (here == e).nonzero().flatten()
        row_of_pair[pairs] = start + torch.arange(len(pairs))
        rows.update({start + i: int(s) for i, s in enumerate(pairs)})
        sizes = cut(len(pairs), tile_rows, extra_rows)
        tiles += [[e, start + sum(sizes[:i]), rows] for i, rows in enumerate(sizes)]
        ends.append(start + len(pairs))
        start += -(-len(pairs) // alignment) * alignment
    assert out.row_end.tolist() == ends
    assert out.row_of_pair.tolist() == row_of_pair.tolist()
    got = out.pair_of_row.tolist()
    assert start <= max_rows(ids.numel(), experts, alignment) == len(got)
    assert all(got[r] == s for r, s in rows.items())
    found = out.tiles.tolist()
    assert len(tiles) <= max_tiles(ids.numel(), experts, tile_rows) == len(found)
    assert [t[:3] for t in found[: len(tiles)]] == tiles
    assert out.tile_count.tolist() == [len(tiles)]
    assert out.units_taken.tolist() == [0, 0]
    of = [t[0] for t in tiles]
    assert [t[3] for t in found[: len(tiles)]] == [of.index(e) | of.count(e) << 16 for e in of]


def random_ids(tokens, experts, topk):
    g = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=g).argsort(1)[:, :topk].int().contiguous()


@pytest.mark.parametrize(
    "tokens",
    [
        1,
        3,
        70,
        *(pytest.param(t, marks=pytest.mark.full) for t in (700, 2048)),
        *([] if INTERPRETED else [8192]),
    ],
)
@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (8, 2), (128, 8), (256, 8)])
@pytest.mark.parametrize(("alignment", "tile_rows"), [(1, 16), (128, 128)])
def test_order_ends_and_tiles_are_those_of_a_stable_sort(
    tokens, experts, topk, alignment, tile_rows
):
    ids = random_ids(tokens, experts, topk)
    check(ids, experts, alignment, tile_rows)
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.2] = -1
    check(ids.long(), experts, alignment, tile_rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_map_says_which_experts_are_here(dtype):
    half = torch.full((128,), -1, dtype=dtype)
    half[32:64] = torch.arange(32)
    check(random_ids(40, 128, 8), 32, 1, 16, half)


def test_two_launches_sort_as_one_does():
    tokens = ONE_LAUNCH_PAIRS // 8 + 3
    check(random_ids(tokens, 128, 8), 128, 1, 128)


@pytest.mark.parametrize("total", [1, 15, 16, 17, 18, 19, 20, 21, 32, 33, 34, 35, 36, 37, 48, 52])
def test_a_few_rows_behind_others_are_no_tile_of_their_own(total):
    ids = torch.cat([torch.zeros(total), torch.full((16 + total % 5,), 2)]).int()[:, None]
    check(ids, 4, 1, 16, extra_rows=2)


def test_all_pairs_to_one_expert():
    check(torch.full((300, 2), 3, dtype=torch.int32), 8, 64, 32)


@pytest.mark.parametrize("mapped", [False, True])
def test_ids_out_of_range_are_no_expert_s(mapped):
    # Narrowed to int32, the last three would be 0, 3 and -1.
    far = [-2, 8, 9, 1 << 30, -(1 << 31), 1 << 32, (1 << 32) + 3, (1 << 32) - 1]
    ids = torch.tensor([[0, 3, 7], *([i, 2, -1] for i in far)])
    # An index that the map gives for no expert here counts as none too.
    check(ids, 8, 1, 16, torch.tensor([3, 8, 0, -5, 7, 1, 2, 1 << 33]) if mapped else None)


def test_a_map_of_nothing_knows_no_id():
    check(torch.tensor([[0, 1], [2, -1]]), 4, 1, 16, torch.empty(0, dtype=torch.int64))


def test_tiles_grow_with_the_rows_of_an_expert():
    means = {0.1: 8, 2: 8, 4: 8, 10: 32, 20: 32, 60: 128, 1000: 128}
    assert {mean: likely_tile_rows(mean, (8, 16, 32, 64, 128)) for mean in means} == means
