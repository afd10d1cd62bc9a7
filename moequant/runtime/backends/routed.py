"""Backends that compute the GEMMs alone; route, sort, weight and reduce are done here, in torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from moequant.runtime.activations import NVFP4_STATIC, Activations, quantize_activations
from moequant.runtime.backends.base import PackedExperts
from moequant.runtime.batched import (
    batch_scheme,
    check_batches,
    finalize_batched,
    largest_batch,
    lay_out,
)
from moequant.runtime.capture import capturing, plain_mode
from moequant.runtime.no_gradient import refuse_gradient
from moequant.runtime.routing import merge_repeated_experts, permute, reduce, route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.routing import Permutation, Routing


class _RoutedExperts(PackedExperts):
    """Routes and quantizes. Ids are checked on the host, but within a capture."""

    waits_for_device: ClassVar[bool] = True

    @abstractmethod
    def _token_scheme(self) -> str:
        """The scheme of their tokens: "none" where the experts themselves quantize."""

    @abstractmethod
    def _weighted(self, x: Activations, routing: Routing) -> Tensor:
        """The experts' results for M tokens, weighted and added up: [M, H] float32."""

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
        w = self.workload
        with plain_mode(out.device):
            routing = route(
                topk_weights,
                topk_ids,
                experts=w.experts,
                expert_map=expert_map,
                check=not capturing(w.device),
            )
            if hidden_scale is not None:
                x = Activations(scheme=w.activations, qdata=hidden_states, scale=hidden_scale)
            else:
                static = None
                if w.activations == "fp8_static":
                    static = self.tensors["w13_input_scale"].amax(0, keepdim=True)
                x = quantize_activations(hidden_states, self._token_scheme(), static_scale=static)
            out.copy_(self._weighted(x, routing))


class StandardExperts(_RoutedExperts):
    """Runs rows that are sorted by expert."""

    def _token_scheme(self) -> str:
        scheme = self.workload.activations
        return "none" if scheme == NVFP4_STATIC else scheme  # each expert has its own scale

    @abstractmethod
    def run_sorted(self, activations: Activations, permutation: Permutation) -> Tensor:
        """Every expert's result for its rows, not yet weighted.

        Args:
            activations: M tokens of H columns; not quantized for "nvfp4_static".
            permutation: the rows of each expert.

        Returns:
            [M * T, H] float32 in the order of `permutation`; 0 in rows that belong to no expert.
        """

    def _weighted(self, x: Activations, routing: Routing) -> Tensor:
        permutation = permute(routing, self.workload.experts)
        return reduce(self.run_sorted(x, permutation), routing, permutation)


class BatchedExperts(_RoutedExperts):
    """Runs a batch of tokens per expert, as an expert-parallel dispatch leaves it."""

    def _token_scheme(self) -> str:
        return batch_scheme(self.workload.activations)

    @abstractmethod
    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """As `run_batches`, for tokens that were checked. The one method that a backend overrides.

        C may be 0.
        """

    def run_batches(
        self, tokens: BatchedTokens, *, names: Mapping[str, str] | None = None
    ) -> Tensor:
        """Every expert's result for its tokens, not yet weighted.

        Nothing waits for a CUDA device: there a count beyond C counts as C.

        Args:
            tokens: at most C tokens of H columns for each of the E experts.
            names: what messages call the fields of `tokens`; by default their names.

        Returns:
            [E, C, H] float32 or bfloat16; rows at or beyond an expert's count hold anything. A
            backward pass through it raises UnsupportedError.

        Raises:
            UnsupportedError: another E, H, scheme or device than these experts have; dtypes or
                shapes that contradict each other; on a CPU, a count beyond C or below 0.
        """
        checked = check_batches(tokens, self.workload, names)
        with plain_mode(self.workload.device):
            result = self._run_batches(checked)
        return refuse_gradient(result, tokens.qdata, tokens.scale)

    def _weighted(self, x: Activations, routing: Routing) -> Tensor:
        M, E = routing.expert.shape[0], self.workload.experts
        if capturing(routing.expert.device):
            # So that M places are enough.
            routing, capacity = merge_repeated_experts(routing), M
        else:
            # `route` has waited for the device already. In 64s, the rows of the largest tile, so
            # that a call before a capture compiles the kernels that the captured one runs.
            largest = largest_batch(routing, E)
            capacity = max(largest, min(M, -(-largest // 64) * 64))
        batches, places = lay_out(x, routing, experts=E, capacity=capacity)
        return finalize_batched(self._run_batches(batches), routing, places)
