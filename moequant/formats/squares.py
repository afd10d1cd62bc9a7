"""Reproducible sums of squares, for requantization errors.

The order of additions is fixed, so that the result does not depend on machine or threads: within
each CHUNK of numbers there are LANES partial sums, which `group_sum` adds; chunks are added in
order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.formats.blocks import group_sum

if TYPE_CHECKING:
    from torch import Tensor

LANES = 16
CHUNK = 256
TILE_ROWS = 128
"""Tiles, and thus chunks, begin at multiples of this, the rows of the largest block."""


def sum_of_squares(x: Tensor, start: float = 0.0) -> float:
    """`start` plus the squares of float32 [...], in float64, because float32 would overflow."""
    squares = x.flatten().double().square_()
    if len(squares) % CHUNK:
        squares = torch.nn.functional.pad(squares, (0, -len(squares) % CHUNK))
    lanes = squares.reshape(-1, CHUNK // LANES, LANES)
    total = torch.zeros_like(lanes[:, 0])
    for step in range(lanes.shape[1]):
        total += lanes[:, step]
    # A loop, because torch's sum does not specify its order.
    for chunk in group_sum(total).tolist():
        start += chunk
    return start
