"""Backends that compute the rows of each expert; route, sort, weight and reduce are done here."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from moequant.runtime.activations import Activations, quantize_activations
from moequant.runtime.backends.base import PackedExperts
from moequant.runtime.capture import capturing, plain_mode
from moequant.runtime.routing import permute, reduce, route

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime.routing import Permutation, Routing
    from moequant.runtime.workload import Workload


class StandardExperts(PackedExperts):
    """Runs rows that are sorted by expert. Ids are checked on the host, but within a capture."""

    capturable = False

    @abstractmethod
    def run_sorted(self, activations: Activations, permutation: Permutation) -> Tensor:
        """Every expert's result for its rows, not yet weighted.

        Args:
            activations: M tokens of H columns.
            permutation: the rows of each expert.

        Returns:
            [M * T, H] float32 in the order of `permutation`; 0 in rows that belong to no expert.
        """

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
            permutation = permute(routing, self.workload.experts)
            out.copy_(reduce(self.run_sorted(x, permutation), routing, permutation))


def routing_of(
    topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, workload: Workload
) -> Routing:
    """The routing of a call; ids are checked where nothing is captured.

    Raises:
        UnsupportedError: an id that is no expert's.
    """
    return route(
        topk_weights,
        topk_ids,
        experts=workload.experts,
        expert_map=expert_map,
        check=not capturing(workload.device),
    )


def as_fed(hidden: Tensor, hidden_scale: Tensor | None, experts: PackedExperts) -> Activations:
    """The hidden states of a call as the first GEMM is fed them."""
    scheme = experts.workload.activations
    if hidden_scale is not None:
        return Activations(scheme=scheme, qdata=hidden, scale=hidden_scale)
    static = None
    if scheme == "fp8_static":
        static = experts.tensors["w13_input_scale"].amax(0, keepdim=True)
    return quantize_activations(hidden, scheme, static_scale=static)
