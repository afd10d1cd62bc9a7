from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.cutlass.batch_places import place_batches
from moequant.kernels.launch import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def placed(counts, capacity):
    given = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    return place_batches(given, capacity, empty=partial(torch.empty, device=DEVICE))


@pytest.mark.parametrize(
    ("counts", "capacity"), [([3, 0, 200, 130, 1], 150), ([1, 0, 1], 1), ([0, 0], 5), ([128], 128)]
)
def test_rows_and_scales_of_the_places_in_use(counts, capacity):
    routing, places = placed(counts, capacity)
    used = [min(n, capacity) for n in counts]
    room = [-(-n // 128) * 128 for n in used]
    offsets = [sum(room[:e]) for e in range(len(room) + 1)]
    ends = [e * capacity + n for e, n in enumerate(used)]
    assert routing.row_end.tolist() == ends
    assert places.expert_offsets.tolist() == [*range(0, len(used) * capacity, capacity), ends[-1]]
    assert places.scale_offsets.tolist() == offsets
    assert torch.equal(routing.pair_of_row, routing.row_of_pair)
    for row, expert in enumerate(places.expert_of_pair.tolist()):
        place = row - expert * capacity
        assert 0 <= place < capacity
        if place < used[expert]:
            assert routing.row_of_pair[row] == row
            assert places.scale_row_of_pair[row] == offsets[expert] + place
        else:
            assert routing.row_of_pair[row] == -1


def test_tile_i_of_the_rows_has_tile_i_of_the_scales():
    routing, places = placed([300, 0, 1, 128], 300)
    n = int(routing.tile_count)
    assert n == 5
    for i, (_, first, rows, _) in enumerate(routing.tiles[:n].tolist()):
        at = slice(first, first + rows)
        assert places.scale_row_of_pair[at].tolist() == [*range(128 * i, 128 * i + rows)]


def test_the_kernels_around_the_gemm_compile_for_sm100(compiled_by):
    kernels = [found["kernel"] for found in compiled_by("compile_fp4_rows.py")]
    assert kernels == ["write_batch_tiles", "place_batch_rows", "act_of_pair"]
