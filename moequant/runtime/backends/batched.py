"""Backends that compute a batch of tokens per expert, as an expert-parallel dispatch leaves it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from moequant.runtime.backends.base import PackedExperts
from moequant.runtime.backends.standard import as_fed, routing_of
from moequant.runtime.batched import check_batches, finalize_batched, largest_batch, lay_out
from moequant.runtime.capture import capturing, plain_mode

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.routing import Routing


class BatchedExperts(PackedExperts):
    """Runs a batch per expert. Ids are checked on the host, but within a capture."""

    capturable = False

    @abstractmethod
    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """As `run_batches`, for tokens that were checked."""

    def run_batches(self, tokens: BatchedTokens) -> Tensor:
        """Every expert's result for its tokens, not yet weighted.

        Nothing waits for a CUDA device: there a count beyond C is taken for C.

        Args:
            tokens: at most C tokens of H columns for each of the E experts.

        Returns:
            [E, C, H] float32 or bfloat16; rows at or beyond an expert's count hold anything.

        Raises:
            UnsupportedError: another E, H, scheme or device than these experts have; dtypes or
                shapes that contradict each other; on a CPU, a count beyond C or below 0.
        """
        return self._run_batches(check_batches(tokens, self.workload))

    def run(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        out: Tensor,
        workspace: Tensor,
        expert_map: Tensor | None,
        hidden_scale: Tensor | None,
    ) -> None:
        """See `PackedExperts.run`."""
        with plain_mode(out.device):
            routing = routing_of(topk_weights, topk_ids, expert_map, self.workload)
            x = as_fed(hidden_states, hidden_scale, self)
            E = self.workload.experts
            capacity = _capacity(routing, hidden_states.shape[0], E)
            batches, places = lay_out(x, routing, experts=E, capacity=capacity)
            out.copy_(finalize_batched(self._run_batches(batches), routing, places))


def _capacity(routing: Routing, tokens: int, experts: int) -> int:
    if capturing(routing.expert.device):
        return tokens
    # `route` has waited for the device already. In 64s, the rows of the largest tile, so that a
    # call before a capture compiles the kernels that the captured one runs.
    largest = largest_batch(routing, experts)
    return max(largest, min(tokens, -(-largest // 64) * 64))
