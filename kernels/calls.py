"""What fused experts of every kind do around their kernels."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

MAX_PAIRS = 65536
"""Token-expert pairs that are sorted at a time; see `moequant.kernels.routing`."""


def run_in_parts(
    plan_for: Callable[[int], Callable[..., None]],
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    out: Tensor,
    expert_map: Tensor | None,
    hidden_scale: Tensor | None,
) -> None:
    """Run a call, of whose token-expert pairs at most MAX_PAIRS are sorted at a time.

    Args:
        plan_for: from a number of tokens, at least 1, what runs so many: it is called with hidden,
            topk_weights, topk_ids, out, expert_map and hidden_scale, all contiguous.
        hidden: [M, H].
        topk_weights: [M, T].
        topk_ids: [M, T].
        out: [M, H] contiguous, written; 0 where there are no pairs.
        expert_map: [global experts] or None.
        hidden_scale: [M, groups], or None where `hidden` is not quantized.
    """
    tokens, T = topk_ids.shape
    if topk_ids.numel() == 0:
        out.zero_()
        return
    inputs = (hidden.contiguous(), topk_weights.contiguous(), topk_ids.contiguous())
    if expert_map is not None:
        expert_map = expert_map.contiguous()
    if hidden_scale is not None:
        hidden_scale = hidden_scale.contiguous()
    most = part_tokens(tokens, T)
    with on(hidden.device):
        if tokens == most:
            plan_for(tokens)(*inputs, out, expert_map, hidden_scale)
            return
        for first in range(0, tokens, most):
            part = slice(first, first + most)
            run = plan_for(out[part].shape[0])
            scale = None if hidden_scale is None else hidden_scale[part]
            run(*(t[part] for t in inputs), out[part], expert_map, scale)


def part_tokens(tokens: int, topk: int) -> int:
    """Tokens of a part of a call: the sort takes MAX_PAIRS pairs."""
    return min(tokens, max(MAX_PAIRS // max(topk, 1), 1))


def launch_sizes(tokens: int, topk: int) -> set[int]:
    """The numbers of tokens, none of them 0, of the parts that `run_in_parts` runs a call in."""
    most = part_tokens(tokens, topk)
    return {most, tokens % most} - {0} if most else set()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to `device`; the interpreter's to none."""
    # Asking takes the host less time than a guard.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
