"""Compile the kernels of all sizes of calls in vLLM's first call, before the server is ready.

That call is the profiling run, with as many tokens as a step may ever have. vLLM then captures some
numbers of tokens in CUDA graphs, and warms up no other: a chunk of a prompt has any number of
tokens, so that the kernels of most would be compiled while requests wait.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from moequant.runtime.warm_up import distinct_calls, tokens_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from moequant.runtime import FusedExperts
    from moequant.runtime.warm_up import Mode

logger = init_logger("vllm.moequant")

_warm: set[Hashable] = set()
"""Kinds of layers whose kernels this process has run; those of one kind share them."""


def warm_up_smaller(
    experts: FusedExperts,
    mode: Mode,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    apply_router_weight_on_input: bool = False,
    hidden_scale: Tensor | None = None,
) -> None:
    """Run the first rows of a call again, once for each set of kernels and kind of layer.

    Args:
        experts: of the layer.
        mode: of all smaller calls, which count; see `tokens_of`.
        hidden_states: [M, H], of the first call; M is at least 1.
        topk_weights: [M, T], likewise.
        topk_ids: [M, T], likewise.
        apply_router_weight_on_input: likewise.
        hidden_scale: [M, groups], likewise, where hidden states come quantized.
    """
    packed, (M, T) = experts.packed(), topk_ids.shape
    dtypes = (hidden_states.dtype, topk_weights.dtype, topk_ids.dtype)
    how = (apply_router_weight_on_input, experts.expert_map is None)
    kind = (packed.workload, packed.backend.name, packed.layout, T, dtypes, how)
    if kind in _warm:
        return
    _warm.add(kind)
    started = time.perf_counter()
    chosen = distinct_calls(experts, tokens_of(mode, M), T)
    if not chosen:
        return
    experts.compile_ahead(chosen, T)
    for tokens in reversed(chosen):  # so that none needs more scratch memory than there is
        experts(
            hidden_states[:tokens],
            topk_weights[:tokens],
            topk_ids[:tokens],
            apply_router_weight_on_input=apply_router_weight_on_input,
            hidden_scale=None if hidden_scale is None else hidden_scale[:tokens],
        )
    logger.info(
        "moequant ran %d calls for steps of up to %d tokens, one a set of kernels, in %.1f s",
        len(chosen),
        M,
        time.perf_counter() - started,
    )
