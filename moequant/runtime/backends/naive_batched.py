"""Batched experts dequantized and multiplied in float32: every format, any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.runtime.activations import GROUPS, Activations
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.routed import BatchedExperts
from moequant.runtime.backends.torch_reference import run_expert, why_not_reference
from moequant.runtime.capture import capturing

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.workload import Workload


class NaiveBatchedExperts(BatchedExperts):
    """See `NaiveBatched`."""

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """See `BatchedExperts.run_batches`; rows beyond the counts are 0."""
        weights = self.weights()
        C = tokens.qdata.shape[1]
        rows = torch.zeros(tokens.qdata.shape, dtype=torch.float32, device=tokens.qdata.device)
        if capturing(rows.device):
            row = torch.arange(C, device=rows.device)[:, None]
            for e in range(weights.experts):
                y = run_expert(_batch(tokens, e, C), weights, e, tokens.scheme)
                rows[e] = torch.where(row < tokens.counts[e], y, 0)
            return rows
        for e, count in enumerate(tokens.counts.tolist()):
            if count:
                rows[e, :count] = run_expert(_batch(tokens, e, count), weights, e, tokens.scheme)
        return rows


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


def _batch(tokens: BatchedTokens, e: int, count: int) -> Activations:
    """The first `count` tokens of expert `e`."""
    return Activations(
        scheme=tokens.scheme,
        qdata=tokens.qdata[e, :count],
        scale=None if tokens.scale is None else tokens.scale[e, :count],
    )
