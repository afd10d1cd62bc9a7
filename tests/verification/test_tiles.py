"""What verification measures of a weight in tiles of rows is what the whole gives."""

from __future__ import annotations

import math

import pytest
import torch

from moequant.formats import CONVERTIBLE, base, quantize, row_tiles, sum_of_squares
from moequant.verification.bounds import find_out_of_bound


def test_a_sum_of_squares_neither_overflows_nor_underflows():
    assert sum_of_squares(torch.tensor([3e38, 2e38])) == pytest.approx(13e76)
    assert math.sqrt(sum_of_squares(torch.tensor([1e-40]))) == pytest.approx(1e-40, rel=1e-5)
    assert math.isnan(sum_of_squares(torch.tensor([math.nan])))


@pytest.mark.parametrize("format", CONVERTIBLE)
def test_what_is_beyond_its_bound_is_the_same_in_tiles(format, monkeypatch):
    monkeypatch.setattr(base, "_TILE_ELEMENTS", 1 << 15)
    w = torch.randn(600, 256, generator=torch.Generator().manual_seed(3)) * 0.02
    q = quantize(w, format)
    assert len(list(row_tiles(q))) == 5
    moved = w.clone()
    for row, column in ((599, 3), (130, 7), (131, 255)):
        moved[row, column] = -moved[row, column].sign() * w.abs().amax()
    whole = find_out_of_bound(moved, q, q)
    found = None
    for rows, tile in row_tiles(q):
        found = find_out_of_bound(moved[rows], tile, tile, first_row=rows.start, before=found)
    assert found == whole
    assert (found.index, found.count) == ((130, 7), 3)
