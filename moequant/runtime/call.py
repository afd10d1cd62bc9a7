"""One call of the experts: prepare, the experts of a backend, finalize.

kind of backend    prepare                               finalize
standard           quantize, sort the slots by expert    weight and add up the sorted rows
batched            quantize, a batch of each expert      weight and add up the batches' rows
fused              by the backend                        by the backend
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.runtime.activations import quantize_activations
from moequant.runtime.backends import BatchedExpertsBackend, ExpertsBackend, FusedBackend
from moequant.runtime.batched import finalize_batched, largest_batch, prepare_batched
from moequant.runtime.capture import capturing
from moequant.runtime.routing import permute, reduce, route, weight_input
from moequant.runtime.workspace import workspace

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime.backends import Backend
    from moequant.runtime.routing import Routing
    from moequant.runtime.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the parts of a call share.

    Attributes:
        backend: what runs it.
        weights: the experts here.
        packed: what a FusedBackend made of them; None for the other kinds.
        scheme: how activations are quantized, of `moequant.runtime.activations`.
        expert_map: [global experts], index here or -1; None where ids are indices.
        weight_on_input: the router's weight multiplies the input; T is 1.
    """

    backend: Backend
    weights: ExpertWeights
    packed: object
    scheme: str
    expert_map: Tensor | None
    weight_on_input: bool

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """[M, H] in the dtype of `hidden_states`; what goes in is as checked by FusedExperts."""
        if isinstance(self.backend, FusedBackend):
            y = self._fused(self.backend, hidden_states, topk_ids, topk_weights)
            return y.to(hidden_states.dtype)
        x, routing = self._routed(hidden_states, topk_ids, topk_weights)
        if isinstance(self.backend, BatchedExpertsBackend):
            y = self._batched(self.backend, x, routing)
        else:
            assert isinstance(self.backend, ExpertsBackend)
            y = self._standard(self.backend, x, routing)
        return y.to(hidden_states.dtype)

    def _fused(self, backend: FusedBackend, x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        if self.weight_on_input:
            x, topk_weights = weight_input(x, topk_weights)
        return backend.forward(
            self.packed,
            x,
            ids,
            topk_weights,
            expert_map=self.expert_map,
            workspace=self._workspace(backend, *ids.shape),
        )

    def _workspace(self, backend: FusedBackend, tokens: int, topk: int) -> Tensor:
        return workspace(self.weights.device, backend.workspace_bytes(self.packed, tokens, topk))

    def _routed(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Tensor, Routing]:
        routing = route(
            topk_ids,
            topk_weights,
            experts=self.weights.experts,
            expert_map=self.expert_map,
            check=not capturing(self.weights.device),
        )
        if self.weight_on_input:
            return hidden_states.float() * routing.weight, routing.unweighted()
        return hidden_states, routing

    def _standard(self, backend: ExpertsBackend, x: Tensor, routing: Routing) -> Tensor:
        permutation = permute(routing, self.weights.experts)
        rows = backend.run(quantize_activations(x, self.scheme), self.weights, permutation)
        return reduce(rows, routing, permutation)

    def _batched(self, backend: BatchedExpertsBackend, x: Tensor, routing: Routing) -> Tensor:
        E = self.weights.experts
        # `route` has waited for the device already, or nothing may.
        capacity = x.shape[0] if capturing(x.device) else largest_batch(routing, E)
        tokens, places = prepare_batched(
            x, routing, experts=E, capacity=capacity, scheme=self.scheme
        )
        return finalize_batched(backend.run(tokens, self.weights), routing, places)


def parts_of(tokens: int, max_tokens: int) -> int:
    """How many parts of at most `max_tokens` tokens a call is run in."""
    return max(-(-tokens // max_tokens), 1)


def run_in_parts(call: Call, inputs: tuple[Tensor, Tensor, Tensor], max_tokens: int) -> Tensor:
    """`call` over parts of at most `max_tokens` tokens, as equal as can be."""
    parts = parts_of(inputs[0].shape[0], max_tokens)
    if parts == 1:
        return call(*inputs)
    hidden, ids, weights = (t.tensor_split(parts) for t in inputs)
    return torch.cat([call(*part) for part in zip(hidden, ids, weights, strict=True)])
