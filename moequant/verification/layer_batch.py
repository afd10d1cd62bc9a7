"""The input of the layers that verify runs: random hidden states and a routing to some experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.models import MoeConfig

TOKENS = 16
MOST_EXPERTS = 8
_SEED = 20251120


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of a layer.

    Attributes:
        experts: ids of the experts used, ascending.
        hidden: [M, H] float32, N(0, 1).
        topk_ids: [M, T] int64, ids out of `experts`.
        topk_weights: [M, T] float32, positive, of sum 1.
        expert_map: [E] int64, the position of each id in `experts`, or -1.
    """

    experts: list[int]
    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    expert_map: Tensor


def experts_run(moe: MoeConfig) -> int:
    """The number of experts of a layer that run."""
    return min(MOST_EXPERTS, moe.experts)


def make_batch(moe: MoeConfig) -> Batch:
    """The same for every layer of a model."""
    generator = torch.Generator().manual_seed(_SEED)
    count = experts_run(moe)
    experts = torch.randperm(moe.experts, generator=generator)[:count].sort().values
    score = torch.rand(TOKENS, count, generator=generator)
    # Every expert is the first choice of at least one token.
    score[torch.arange(TOKENS), torch.arange(TOKENS) % count] += 1
    weight, slot = score.topk(min(moe.top_k, count))
    expert_map = torch.full((moe.experts,), -1, dtype=torch.int64)
    expert_map[experts] = torch.arange(count)
    return Batch(
        experts=experts.tolist(),
        hidden=torch.randn(TOKENS, moe.hidden, generator=generator),
        topk_ids=experts[slot],
        topk_weights=weight / weight.sum(1, keepdim=True),
        expert_map=expert_map,
    )
