"""Views of a matrix as the blocks that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(w: Tensor, group: int) -> Tensor:
    """[..., N, K] as [..., N, K / group, group], K a multiple of `group`."""
    return w.unflatten(-1, (-1, group))


def group_amax(w: Tensor, group: int) -> Tensor:
    """Largest magnitude of each group: [..., N, K] to [..., N, K / group]."""
    return grouped(w, group).abs().amax(-1)


def block_amax(w: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block: [..., N, K] to [..., ceil(N / bn), ceil(K / bk)].

    Blocks at the end may be ragged; N or K may be 0.
    """
    block_n, block_k = block
    *lead, N, K = w.shape
    padded = torch.nn.functional.pad(w.abs(), (0, -K % block_k, 0, -N % block_n))
    tiles = padded.unflatten(-1, (-1, block_k)).unflatten(-3, (-1, block_n))
    return tiles.amax((-3, -1)) if tiles.numel() else tiles.new_zeros(*lead, *_extents(w, block))


def expand_blocks(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Repeat each block's scale over its elements and crop: [..., N, K]."""
    N, K = shape[-2:]
    rows = scale.repeat_interleave(block[0], -2)[..., :N, :]
    return rows.repeat_interleave(block[1], -1)[..., :K]


def _extents(w: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    return -(-w.shape[-2] // block[0]), -(-w.shape[-1] // block[1])
