"""How much a weight is, and how much of it something changed: sums of squares.

They are the same on every machine and with every number of threads, for the order in which squares
are added is fixed: that of LANES sums side by side over each CHUNK of numbers, those added as
`group_sum` adds, and chunk after chunk.
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
"""Tiles begin at multiples of this, the rows of the largest block, and chunks with them."""


def sum_of_squares(x: Tensor, start: float = 0.0) -> float:
    """`start` and the squares of float32 [...], in float64: those of float32 would overflow."""
    squares = x.flatten().double().square_()
    if len(squares) % CHUNK:
        squares = torch.nn.functional.pad(squares, (0, -len(squares) % CHUNK))
    lanes = squares.reshape(-1, CHUNK // LANES, LANES)
    total = torch.zeros_like(lanes[:, 0])
    for step in range(lanes.shape[1]):
        total += lanes[:, step]
    # One after the other: torch's own sum adds in an order of its own.
    for chunk in group_sum(total).tolist():
        start += chunk
    return start
