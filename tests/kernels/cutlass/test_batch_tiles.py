from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.cutlass.batch_tiles import batch_tiles
from moequant.kernels.launch import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def test_tiles_cover_each_expert_s_rows_in_use():
    counts = torch.tensor([3, 0, 20, 99, 8], dtype=torch.int32, device=DEVICE)
    tiles = torch.full((5 * 3, 4), -7, dtype=torch.int32, device=DEVICE)
    tile_count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    batch_tiles(counts, tiles, tile_count, capacity=20, tile_rows=8)
    want = [
        [0, 0, 3],
        *([2, 40, 8], [2, 48, 8], [2, 56, 4]),
        *([3, 60, 8], [3, 68, 8], [3, 76, 4]),  # 99 counts as 20
        [4, 80, 8],
    ]
    assert tiles[: tile_count.item(), :3].tolist() == want
    assert bool((tiles[len(want) :] == -7).all())
