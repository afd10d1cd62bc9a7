"""Which experts each token goes to: as the router says it, and sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.arguments import check_argument, check_count
from moequant.errors import UnsupportedError
from moequant.runtime.capture import plain_mode

if TYPE_CHECKING:
    from torch import Tensor

NOWHERE = -1
"""Index for an expert that is not on this device; its token-expert pair contributes nothing."""

ID_DTYPES = (torch.int32, torch.int64)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The T token-expert pairs of each token.

    Attributes:
        expert: [M, T] int64, index of an expert here, or NOWHERE.
        weight: [M, T] float32, 0 where `expert` is NOWHERE.
    """

    expert: Tensor
    weight: Tensor


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """The M * T token-expert pairs as rows, sorted by expert and then by token.

    All shapes depend only on M, T and E: rows without an expert on this device come last.

    Attributes:
        token: [M * T] int64, the token of each row.
        offsets: [E + 1] int64; expert e has rows offsets[e] to offsets[e + 1].
        row: [M, T] int64, the row of each token-expert pair.
    """

    token: Tensor
    offsets: Tensor
    row: Tensor


def route(
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    experts: int,
    expert_map: Tensor | None = None,
    check: bool = True,
) -> Routing:
    """The routing as seen by the `experts` experts here.

    Args:
        topk_weights: [M, T] float32, bfloat16 or float16.
        topk_ids: [M, T] int32 or int64, the router's choice; -1 means no expert.
        experts: E, the number of experts here.
        expert_map: [global experts] int32 or int64: index here of each id, or -1; by default an id
            is the index. An index that is no expert's means none.
        check: whether to refuse ids out of range, which waits for the device; else they mean
            no expert.

    Raises:
        UnsupportedError: an argument of another kind, dtype or shape; an id that is neither -1 nor
            an expert's, which is named.
    """
    check_argument("topk_weights", topk_weights, WEIGHT_DTYPES, "[M, T]")
    check_argument("topk_ids", topk_ids, ID_DTYPES, "[M, T]")
    if topk_weights.shape != topk_ids.shape:
        raise UnsupportedError(
            f"topk_weights is {list(topk_weights.shape)}, but topk_ids {list(topk_ids.shape)}; "
            "give a weight for each id"
        )
    experts = check_count("experts", experts)
    if expert_map is not None:
        check_argument("expert_map", expert_map, ID_DTYPES, "[global experts]")
    count = experts if expert_map is None else expert_map.shape[0]
    unknown = (topk_ids < NOWHERE) | (topk_ids >= count)
    if check and unknown.any():
        m, t = unknown.nonzero()[0].tolist()
        there = f"the experts are 0 to {count - 1}" if count else "there are no experts"
        of = "" if expert_map is None else f"; expert_map has a length of {count}"
        raise UnsupportedError(
            f"topk_ids[{m}, {t}] is {int(topk_ids[m, t])}, but {there}, and -1 for none{of}"
        )
    expert = topk_ids.long().masked_fill(unknown, NOWHERE)
    if expert_map is not None:
        # Id -1 indexes the last entry, which the padding makes NOWHERE.
        expert = torch.nn.functional.pad(expert_map.long(), (0, 1), value=NOWHERE)[expert]
        expert = expert.masked_fill((expert < NOWHERE) | (expert >= experts), NOWHERE)
    return Routing(expert=expert, weight=topk_weights.float().masked_fill(expert == NOWHERE, 0.0))


def merge_repeated_experts(routing: Routing) -> Routing:
    """The same with each expert of a token in one pair, the first, which has all its weights.

    Other pairs of that expert are NOWHERE. A routing without repeats stays as it is. Nothing waits
    for the device.
    """
    same = routing.expert[:, :, None] == routing.expert[:, None, :]
    repeats = same.tril(-1).any(2)
    weight = torch.where(same, routing.weight[:, None, :], 0.0).sum(2)
    return Routing(
        expert=routing.expert.masked_fill(repeats, NOWHERE),
        weight=weight.masked_fill(repeats, 0.0),
    )


def weight_input(
    hidden_states: Tensor, hidden_scale: Tensor | None, topk_weights: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Multiply the input by the router weights [M, 1] in float32, and return weights of 1.

    For quantized hidden states, the scales are multiplied.
    """
    with plain_mode(hidden_states.device):
        ones = torch.ones_like(topk_weights)
        if hidden_scale is not None:
            return hidden_states, hidden_scale * topk_weights.float(), ones
        return hidden_states.float() * topk_weights.float(), None, ones


def permute(routing: Routing, experts: int) -> Permutation:
    """Sort the token-expert pairs by expert; the order is deterministic."""
    M, T = routing.expert.shape
    key = routing.expert.masked_fill(routing.expert == NOWHERE, experts).flatten()
    sorted_key, pair = key.sort(stable=True)
    row = torch.empty_like(pair)
    row[pair] = torch.arange(M * T, device=pair.device)
    return Permutation(
        token=pair // max(T, 1),
        offsets=torch.searchsorted(sorted_key, torch.arange(experts + 1, device=pair.device)),
        row=row.reshape(M, T),
    )


def reduce(rows: Tensor, routing: Routing, permutation: Permutation) -> Tensor:
    """Weight the experts' results and add them up for each token, in float32.

    The order is that of the router's choice, so the sum is the same in every run and does not
    depend on the numbering of experts.

    Args:
        rows: [M * T, H] float32; rows that belong to no expert here are 0.
        routing: the weights.
        permutation: the row of each token-expert pair.

    Returns:
        [M, H] float32.
    """
    M, T = routing.weight.shape
    result = rows.new_zeros(M, rows.shape[1])
    for t in range(T):
        result += routing.weight[:, t, None] * rows[permutation.row[:, t]]
    return result
