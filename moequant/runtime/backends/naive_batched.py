"""Batched experts dequantized and multiplied in float32: every format, any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.runtime.activations import (
    FP8_TENSOR,
    GROUPS,
    Activations,
    quantize_activations,
)
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.routed import BatchedExperts
from moequant.runtime.backends.torch_reference import (
    activate,
    project,
    run_expert,
    why_not_reference,
)
from moequant.runtime.capture import capturing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.workload import Workload


class NaiveBatchedExperts(BatchedExperts):
    """See `NaiveBatched`."""

    compiles = False

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """See `BatchedExperts.run_batches`; rows beyond the counts are 0."""
        weights, scheme = self.weights(), tokens.scheme

        def batch(e: int, count: int) -> Activations:
            return Activations(
                scheme=scheme,
                qdata=tokens.qdata[e, :count],
                scale=None if tokens.scale is None else tokens.scale[e, :count],
            )

        if scheme != FP8_TENSOR:
            return self._each_expert(
                tokens, weights.hidden, lambda e, n: run_expert(batch(e, n), weights, e, scheme)
            )
        h = self._each_expert(
            tokens, weights.intermediate, lambda e, n: activate(batch(e, n), weights, e, scheme)
        )
        # Rows beyond the counts are 0, which makes no scale larger.
        rows = quantize_activations(h.flatten(0, 1), scheme).dequantize().view(h.shape)
        return self._each_expert(
            tokens, weights.hidden, lambda e, n: project(rows[e, :n], weights, e)
        )

    def _each_expert(
        self, tokens: BatchedTokens, columns: int, compute: Callable[[int, int], Tensor]
    ) -> Tensor:
        """What `compute` makes of the first rows of each expert: [E, C, columns] float32.

        Rows beyond the counts are 0. Within a capture, each expert is asked for all its C rows.
        """
        E, C, _ = tokens.qdata.shape
        device = tokens.qdata.device
        result = torch.zeros(E, C, columns, dtype=torch.float32, device=device)
        if capturing(device):
            row = torch.arange(C, device=device)[:, None]
            for e in range(E):
                result[e] = torch.where(row < tokens.counts[e], compute(e, C), 0)
            return result
        for e, count in enumerate(tokens.counts.tolist()):
            if count:
                result[e, :count] = compute(e, count)
        return result


class NaiveBatched(Backend):
    """`torch_reference` over a batch for each expert; the other batched backends are judged by it.

    Counts are read on the host, but within the capture of a CUDA graph, where every expert computes
    all its C rows.
    """

    name = "naive_batched"
    experts = NaiveBatchedExperts

    def supports(self, workload: Workload) -> str | None:
        """See `why_not_reference`; and schemes without batches."""
        if workload.activations in GROUPS:
            return f"takes no batches of tokens in {workload.activations}"
        return why_not_reference(workload)
