"""Which calls run the same compiled kernels around their GEMMs, so that one warms up the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.kernels.calls import part_tokens
from moequant.kernels.routing import sort_kernel
from moequant.kernels.weighted_reduce import block_of

if TYPE_CHECKING:
    from collections.abc import Hashable


def around_gemms(tokens: int, topk: int) -> tuple[Hashable, ...]:
    """Equal for calls whose sort and reduction are the same compiled kernels.

    The sort is compiled for powers of two of the token-expert pairs, and for the upper half of what
    can be sorted; Triton compiles it apart for numbers of pairs that are 1 or multiples of 16.

    Args:
        tokens: M, at least 1; of more than are sorted at a time, the first part counts.
        topk: T, at least 1.
    """
    tokens = part_tokens(tokens, topk)
    pairs = tokens * topk
    return sort_kernel(pairs), pairs % 16 == 0, pairs == 1, block_of(tokens), topk
