"""What fused experts of every kind do around their kernels: an output, and parts to sort."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from moequant.kernels.routing import MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor


def run_in_parts(
    plan_for: Callable[[int], Callable[..., None]],
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    hidden_scale: Tensor | None,
) -> Tensor:
    """The output of a call, whose slots are sorted at most MAX_SLOTS at a time.

    Args:
        plan_for: from a number of tokens, at least 1, what runs so many: it is called with the five
            below, contiguous, and the output [M, H] behind the first three.
        hidden: [M, H].
        topk_ids: [M, T].
        topk_weights: [M, T].
        expert_map: [global experts] or None.
        hidden_scale: [M, groups], or None where `hidden` is not quantized.

    Returns:
        [M, H] of `out_dtype`; 0 where there are no slots.
    """
    tokens, T = topk_ids.shape
    dtype = out_dtype(hidden)
    if topk_ids.numel() == 0:
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    inputs = (hidden.contiguous(), topk_ids.contiguous(), topk_weights.contiguous())
    if expert_map is not None:
        expert_map = expert_map.contiguous()
    if hidden_scale is not None:
        hidden_scale = hidden_scale.contiguous()
    out = torch.empty_like(inputs[0], dtype=dtype)
    most = part_tokens(tokens, T)
    with on(hidden.device):
        if tokens == most:
            plan_for(tokens)(*inputs, out, expert_map, hidden_scale)
            return out
        for first in range(0, tokens, most):
            part = slice(first, first + most)
            run = plan_for(out[part].shape[0])
            scale = None if hidden_scale is None else hidden_scale[part]
            run(*(t[part] for t in inputs), out[part], expert_map, scale)
    return out


def part_tokens(tokens: int, topk: int) -> int:
    """Tokens of a part of a call: the sort takes MAX_SLOTS slots."""
    return min(tokens, max(MAX_SLOTS // max(topk, 1), 1))


def out_dtype(hidden: Tensor) -> torch.dtype:
    """Of the result for hidden states that are not quantized, or are, as FP8 or its bytes."""
    return torch.bfloat16 if hidden.dtype.itemsize == 1 else hidden.dtype


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to `device`; the interpreter's to none."""
    # Asking takes the host less time than a guard.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
