"""Batched experts in every format, on any CUDA device from SM80 on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.runtime.backends.base import BatchedExpertsBackend, Workload
from moequant.runtime.backends.triton_portable import portable_experts, why_not_portable

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.weights import ExpertWeights


class TritonBatched(BatchedExpertsBackend):
    """The kernels of `triton` on the batches of an expert-parallel dispatch.

    Results are bfloat16, or float32 for float16 and float32 tokens that are not quantized. Nothing
    is read on the host.
    """

    name = "triton_batched"
    default_on = ()

    def supports(self, workload: Workload) -> str | None:
        """Wants a CUDA device of SM80 or newer, and triton."""
        return why_not_portable(workload)

    def run(self, tokens: BatchedTokens, weights: ExpertWeights) -> Tensor:
        """See `BatchedExpertsBackend.run`."""
        from moequant.kernels.portable.batched import batched_experts

        codes = tokens.qdata if tokens.scale is None else tokens.qdata.view(torch.uint8)
        scale = None if tokens.scale is None else tokens.scale.contiguous()
        experts = portable_experts(weights, tokens.scheme)
        return batched_experts(experts, codes.contiguous(), scale, tokens.counts)
