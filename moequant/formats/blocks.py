"""Views of a matrix as the blocks that share a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def grouped(w: Tensor, group: int) -> Tensor:
    """[..., N, K] as [..., N, K / group, group], K a multiple of `group`."""
    return w.reshape(*w.shape[:-1], w.shape[-1] // group, group)


def group_amax(w: Tensor, group: int) -> Tensor:
    """Largest magnitude of each group: [..., N, K] to [..., N, K / group]."""
    return grouped(w, group).abs().amax(-1)


def group_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two long: [..., group] to [...].

    Adds halves elementwise, so that the rounding depends on nothing but the group itself: not on
    its neighbours, the batch or the number of threads.
    """
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)


def weighted_group_sum(squares: Tensor, importance: Tensor | None) -> Tensor:
    """`group_sum` of squares [..., K / group, group], each times the importance of its column.

    `importance` is [K] float32, or None for 1.
    """
    if importance is not None:
        squares = squares * grouped(importance, squares.shape[-1])
    return group_sum(squares)


def matrix_amax(w: Tensor) -> Tensor:
    """Largest magnitude of each matrix, float32: [..., N, K] to [...]; 0 where it is empty."""
    if 0 in w.shape[-2:]:
        return torch.zeros(w.shape[:-2], dtype=torch.float32, device=w.device)
    return w.abs().amax((-2, -1)).float()


def block_amax(w: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block: [..., N, K] to [..., ceil(N / bn), ceil(K / bk)].

    The last blocks of rows and columns may be incomplete; N or K may be 0.
    """
    block_n, block_k = block
    *lead, N, K = w.shape
    tiles_n, tiles_k = -(-N // block_n), -(-K // block_k)
    padded = torch.nn.functional.pad(w.abs(), (0, tiles_k * block_k - K, 0, tiles_n * block_n - N))
    tiles = padded.reshape(*lead, tiles_n, block_n, tiles_k, block_k)
    return tiles.amax((-3, -1))


def expand_blocks(scale: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """Repeat each block's scale over its elements and crop: [..., N, K]."""
    N, K = shape[-2:]
    # Faster than `repeat_interleave` by a factor of three.
    rows = scale.unsqueeze(-1).expand(*scale.shape, block[1]).flatten(-2)[..., :K]
    return rows.unsqueeze(-2).expand(*rows.shape[:-1], block[0], K).flatten(-3, -2)[..., :N, :]
