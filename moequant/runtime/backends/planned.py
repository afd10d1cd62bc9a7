"""Backends whose calls are plans: kernels and buffers for one number of tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from moequant.kernels.calls import launch_sizes, run_in_parts
from moequant.kernels.kept_plans import KeptPlans
from moequant.runtime.backends.base import PackedExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from moequant.kernels.arena import WorkspaceArena
    from moequant.runtime.backends.base import Backend
    from moequant.runtime.workload import Workload


class PlannedExperts(PackedExperts):
    """Runs a call by its plan, made in the first call of its size with that workspace."""

    def __init__(
        self, backend: Backend, tensors: Mapping[str, Tensor], *, workload: Workload
    ) -> None:
        super().__init__(backend, tensors, workload=workload)
        self._plans: KeptPlans[Callable[..., None]] = KeptPlans()
        self._workspace_bytes: dict[tuple[int, int], int] = {}

    @abstractmethod
    def plan(
        self, tokens: int, topk: int, arena: WorkspaceArena, dtype: torch.dtype
    ) -> Callable[..., None]:
        """What runs calls of exactly [tokens, topk] token-expert pairs, as `run_in_parts` calls it.

        It runs many calls, so it may prepare all that depends on weights and buffers alone; but not
        before the first call, because it may be made to count bytes only.

        Args:
            tokens: M, at least 1.
            topk: T, at least 1.
            arena: where its buffers come from; on "meta" where bytes are counted.
            dtype: of the hidden states.
        """

    def workspace_bytes(self, tokens: int, topk: int) -> int:
        """As for float32 hidden states, which take most."""
        if tokens * topk == 0:
            return 0
        known = self._workspace_bytes
        if (tokens, topk) not in known:
            parts = launch_sizes(tokens, topk)
            known[tokens, topk] = max(self._part_bytes(part, topk) for part in parts)
        return known[tokens, topk]

    def _part_bytes(self, tokens: int, topk: int) -> int:
        from moequant.kernels.arena import WorkspaceArena

        arena = WorkspaceArena()
        self.plan(tokens, topk, arena, torch.float32)
        return arena.size_bytes

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
        from moequant.kernels.arena import WorkspaceArena

        T, dtype = topk_ids.shape[1], hidden_states.dtype

        def plan_for(tokens: int) -> Callable[..., None]:
            return self._plans.get(
                (tokens, T, dtype),
                workspace,
                lambda: self.plan(tokens, T, WorkspaceArena(workspace), dtype),
            )

        run_in_parts(
            plan_for,
            hidden_states,
            topk_weights,
            topk_ids,
            out=out,
            expert_map=expert_map,
            hidden_scale=hidden_scale,
        )
