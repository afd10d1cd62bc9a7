"""Backends whose calls are plans: kernels and buffers for one number of tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from moequant.runtime.backends.base import PackedExperts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.kernels.arena import WorkspaceArena


class PlannedExperts(PackedExperts):
    """Makes a plan for each call, in the workspace of that call, and runs it."""

    @abstractmethod
    def plan(
        self, tokens: int, topk: int, arena: WorkspaceArena, dtype: torch.dtype
    ) -> Callable[..., None]:
        """What runs calls of exactly [tokens, topk] token-expert pairs, as `run_in_parts` calls it.

        Args:
            tokens: M, at least 1.
            topk: T, at least 1.
            arena: where its buffers come from.
            dtype: of the hidden states.
        """

    def workspace_bytes(self, tokens: int, topk: int) -> int:
        """As for float32 hidden states, which take most."""
        from moequant.kernels.arena import WorkspaceArena
        from moequant.kernels.calls import part_tokens

        arena = WorkspaceArena()
        if tokens * topk:
            self.plan(part_tokens(tokens, topk), topk, arena, torch.float32)
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
        from moequant.kernels.calls import run_in_parts

        def plan_for(tokens: int) -> Callable[..., None]:
            arena = WorkspaceArena(workspace)
            return self.plan(tokens, topk_ids.shape[1], arena, hidden_states.dtype)

        run_in_parts(
            plan_for,
            hidden_states,
            topk_weights,
            topk_ids,
            out=out,
            expert_map=expert_map,
            hidden_scale=hidden_scale,
        )
