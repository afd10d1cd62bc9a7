"""Compile what calls will need, before they come.

Kernels are compiled when they are first used, some seconds each, and kept on disk: ours under
MOEQUANT_CACHE_DIR, Triton's under TRITON_CACHE_DIR. A server would rather wait before its first
request than in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moequant.progress import Progress
    from moequant.runtime.experts import FusedExperts


def warm_up(
    experts: FusedExperts, tokens: Iterable[int], topk: int, *, progress: Progress | None = None
) -> list[int]:
    """Compile every kernel that calls of `tokens` tokens run, and no other.

    Args:
        experts: on the device they will run on; layers of the same sizes share kernels.
        tokens: each M that may come; M of equal kernels are run once.
        topk: T.
        progress: told of every set of kernels.

    Returns:
        The M that were run, one for each set of kernels; none where the backend compiles nothing.

    Raises:
        UnsupportedError: no backend runs the experts.
    """
    report = progress or SilentProgress()
    representative = {experts.kernels_for(M, topk): M for M in sorted(set(tokens), reverse=True)}
    representative.pop(None, None)
    chosen = sorted(representative.values())
    report.start("compiling", len(chosen), unit="kernel sets")
    for M in chosen:
        _call(experts, M, topk)
        report.advance(1, f"{M} tokens")
    report.finish()
    return chosen


def _call(experts: FusedExperts, tokens: int, topk: int) -> None:
    weights = experts.weights
    ids = torch.arange(tokens * topk, device=weights.device, dtype=torch.int32)
    experts(
        torch.zeros(tokens, weights.hidden, device=weights.device, dtype=torch.bfloat16),
        (ids % weights.experts).reshape(tokens, topk),
        torch.full((tokens, topk), 1 / topk, device=weights.device),
    )
    if weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)
