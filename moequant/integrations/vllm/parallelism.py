"""How tokens reach the ranks of their experts, by the names of vLLM's all-to-alls."""

from __future__ import annotations

from typing import Any

GATHERING = "allgather_reducescatter"
"""With it, vLLM gathers the tokens of all data-parallel ranks before it calls a method that has no
kernel of vLLM's, and adds and scatters what the ranks return."""
SENDING = ("deepep_high_throughput", "deepep_low_latency")
"""With these, tokens are sent to the ranks of their experts: as rows, and in batches."""


def sends_tokens(parallel: Any) -> bool:
    """Whether vLLM sends tokens to the ranks of their experts, by an all-to-all that is served.

    Args:
        parallel: vLLM's `FusedMoEParallelConfig`.
    """
    return parallel.all2all_backend in SENDING and parallel.use_all2all_kernels
