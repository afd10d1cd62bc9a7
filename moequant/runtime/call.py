"""One call of a layer's experts: checks, parts, workspace, and the run itself.

Streams: everything runs on the current stream of the experts' device, and nothing is synchronized
but by backends that say so. Threads: calls of one layer from several threads do not disturb each
other. Graphs: a call of a backend that reads nothing on the host can be captured, after one call of
its size outside of the capture, which compiles kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.kernels.calls import part_tokens
from moequant.runtime.inputs import NAMES, check_apart, check_inputs, check_out, check_workspace
from moequant.runtime.no_gradient import refuse_gradient
from moequant.runtime.routing import weight_input
from moequant.runtime.workspace import shared_workspace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from moequant.runtime.backends import PackedExperts
    from moequant.runtime.inputs import ArgumentNames

MAX_TOKENS = 8192
"""Tokens of a part, unless told otherwise: what servers put in one step, and beyond which no kernel
gets faster."""


def run_experts(
    packed: PackedExperts,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    weight_on_input: bool = False,
    hidden_scale: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    max_tokens: int = MAX_TOKENS,
    names: ArgumentNames = NAMES,
) -> Tensor:
    """Run packed experts; arguments and errors are those of `FusedExperts.forward`.

    `expert_map` has been checked. Messages call arguments by `names`.
    """
    check_inputs(
        packed.workload,
        hidden_states,
        topk_weights,
        topk_ids,
        weight_on_input=weight_on_input,
        hidden_scale=hidden_scale,
        names=names,
    )
    if hidden_scale is not None and not packed.takes_quantized:
        raise UnsupportedError(
            f"backend {packed.backend.name!r} does not take quantized hidden states; give them "
            f"without {names.hidden_scale}, or name another backend"
        )
    tokens, topk = topk_ids.shape
    given = out
    if out is None:
        dtype = hidden_states.dtype if hidden_scale is None else torch.bfloat16
        out = torch.empty(hidden_states.shape, dtype=dtype, device=hidden_states.device)
    else:
        check_out(out, hidden_states, hidden_scale, names)
    parts = count_parts(tokens, topk, max_tokens)
    sizes = part_sizes(tokens, parts)
    size_bytes = max(packed.workspace_bytes(size, topk) for size in sizes)
    if workspace is None:
        workspace = shared_workspace(hidden_states.device, size_bytes)
    else:
        check_workspace(workspace, size_bytes, hidden_states.device)
    if given is not None:
        others = (hidden_states, topk_weights, topk_ids, hidden_scale, expert_map, workspace)
        check_apart(given, others, names)
    _run_parts(
        packed,
        (hidden_states, topk_weights, topk_ids, out),
        hidden_scale,
        parts=parts,
        workspace=workspace,
        expert_map=expert_map,
        weight_on_input=weight_on_input,
    )
    return refuse_gradient(out, hidden_states, topk_weights, topk_ids, hidden_scale)


def _run_parts(
    packed: PackedExperts,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    hidden_scale: Tensor | None,
    *,
    parts: int,
    workspace: Tensor,
    expert_map: Tensor | None,
    weight_on_input: bool,
) -> None:
    """Run `tensors`, which are hidden states, router weights, ids and result, in so many parts."""
    split: Iterable[tuple[Tensor, ...]] = [tensors]
    scales: Sequence[Tensor | None] = [hidden_scale] * parts
    if parts > 1:
        split = zip(*(t.tensor_split(parts) for t in tensors), strict=True)
        if hidden_scale is not None:
            scales = hidden_scale.tensor_split(parts)
    for (hidden, weights, ids, result), scale in zip(split, scales, strict=True):
        if weight_on_input:
            hidden, scale, weights = weight_input(hidden, scale, weights)
        packed.run(
            hidden,
            weights,
            ids,
            out=result,
            workspace=workspace,
            expert_map=expert_map,
            hidden_scale=scale,
        )


def count_parts(tokens: int, topk: int, max_tokens: int) -> int:
    """In how many parts a call of [tokens, topk] token-expert pairs is run.

    A part has at most `max_tokens` tokens, and no more pairs than kernels sort at a time, so that
    they need not split it again.
    """
    return max(-(-tokens // part_tokens(max_tokens, topk)), 1)


def part_sizes(tokens: int, parts: int) -> tuple[int, ...]:
    """The numbers of tokens of so many parts, the larger first; they differ by at most 1.

    Kernels, their tilings and what they need of the workspace are chosen by them.
    """
    most, least = -(-tokens // parts), tokens // parts
    return (most,) if most == least else (most, least)
