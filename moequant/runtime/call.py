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

from moequant.runtime.activations import Activations, quantize_activations
from moequant.runtime.backends import BatchedExpertsBackend, ExpertsBackend, FusedBackend
from moequant.runtime.batched import finalize_batched, largest_batch, lay_out
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

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        hidden_scale: Tensor | None = None,
    ) -> Tensor:
        """[M, H] in the dtype of `hidden_states`, or bfloat16 where they come with scales.

        What goes in is as checked by FusedExperts.
        """
        if isinstance(self.backend, FusedBackend):
            return run_fused(
                self.backend,
                self.packed,
                (hidden_states, topk_ids, topk_weights, hidden_scale),
                scheme=self.scheme,
                expert_map=self.expert_map,
                weight_on_input=self.weight_on_input,
            )
        x, routing = self._routed(hidden_states, topk_ids, topk_weights, hidden_scale)
        if isinstance(self.backend, BatchedExpertsBackend):
            y = self._batched(self.backend, x, routing)
        else:
            assert isinstance(self.backend, ExpertsBackend)
            y = self._standard(self.backend, x, routing)
        return y.to(output_dtype(hidden_states, hidden_scale))

    def _routed(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        hidden_scale: Tensor | None,
    ) -> tuple[Activations, Routing]:
        """The activations as the experts are fed them, and the routing."""
        routing = route(
            topk_ids,
            topk_weights,
            experts=self.weights.experts,
            expert_map=self.expert_map,
            check=not capturing(self.weights.device),
        )
        x, scale = hidden_states, hidden_scale
        if self.weight_on_input:
            if scale is None:
                x = x.float() * routing.weight
            else:
                scale = scale * routing.weight
            routing = routing.unweighted()
        if scale is not None:
            return Activations(scheme=self.scheme, qdata=x, scale=scale), routing
        static = self.weights.static_scale("gate_up")
        return quantize_activations(x, self.scheme, static_scale=static), routing

    def _standard(self, backend: ExpertsBackend, x: Activations, routing: Routing) -> Tensor:
        permutation = permute(routing, self.weights.experts)
        rows = backend.run(x, self.weights, permutation)
        return reduce(rows, routing, permutation)

    def _batched(self, backend: BatchedExpertsBackend, x: Activations, routing: Routing) -> Tensor:
        E = self.weights.experts
        batches, places = lay_out(x, routing, experts=E, capacity=self._capacity(x, routing))
        return finalize_batched(backend.run(batches, self.weights), routing, places)

    def _capacity(self, x: Activations, routing: Routing) -> int:
        tokens = x.qdata.shape[0]
        if capturing(x.qdata.device):
            return tokens
        # `route` has waited for the device already. In 64s, the rows of the largest tile: so a call
        # before a capture compiles the kernels that the captured one runs.
        largest = largest_batch(routing, self.weights.experts)
        return max(largest, min(tokens, -(-largest // 64) * 64))


def run_fused(
    backend: FusedBackend,
    packed: object,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    *,
    scheme: str,
    expert_map: Tensor | None,
    weight_on_input: bool,
) -> Tensor:
    """A call of a fused backend, with the workspace of all layers.

    Args:
        backend: what runs it.
        packed: what it made of the weights.
        inputs: hidden states, ids, router weights, and the scales of hidden states or None.
        scheme: by which these are quantized.
        expert_map: see `Call`.
        weight_on_input: see `Call`.
    """
    x, ids, weights, scale = inputs
    dtype = output_dtype(x, scale)
    memory = workspace(ids.device, backend.workspace_bytes(packed, *ids.shape))
    hidden: Tensor | Activations = x
    if scale is not None:
        if weight_on_input:
            scale, weights = weight_input(scale, weights)
        hidden = Activations(scheme=scheme, qdata=x, scale=scale)
    elif weight_on_input:
        hidden, weights = weight_input(x, weights)
    y = backend.forward(packed, hidden, ids, weights, expert_map=expert_map, workspace=memory)
    return y.to(dtype)


def output_dtype(hidden_states: Tensor, hidden_scale: Tensor | None) -> torch.dtype:
    """That of the hidden states, or bfloat16 where they are quantized."""
    return hidden_states.dtype if hidden_scale is None else torch.bfloat16


def parts_of(tokens: int, max_tokens: int) -> int:
    """How many parts of at most `max_tokens` tokens a call is run in."""
    return max(-(-tokens // max_tokens), 1)


def run_in_parts(call: Call, inputs: tuple[Tensor, ...], max_tokens: int) -> Tensor:
    """`call` over parts of at most `max_tokens` tokens, as equal as can be."""
    parts = parts_of(inputs[0].shape[0], max_tokens)
    if parts == 1:
        return call(*inputs)
    split = (t.tensor_split(parts) for t in inputs)
    return torch.cat([call(*part) for part in zip(*split, strict=True)])
