"""Batched experts in every format, on any CUDA device from SM80 on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.routed import BatchedExperts
from moequant.runtime.backends.triton_portable import portable_experts, why_not_portable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.workload import Workload


class TritonBatchedExperts(BatchedExperts):
    """See `TritonBatched`."""

    def __init__(
        self, backend: Backend, tensors: Mapping[str, Tensor], *, workload: Workload
    ) -> None:
        super().__init__(backend, tensors, workload=workload)
        self._experts = portable_experts(self.weights(), workload.activations)

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        from moequant.kernels.portable.portable_fused import batched_experts

        codes = tokens.qdata if tokens.scale is None else tokens.qdata.view(torch.uint8)
        scale = None if tokens.scale is None else tokens.scale.contiguous()
        return batched_experts(self._experts, codes.contiguous(), scale, tokens.counts)


class TritonBatched(Backend):
    """The kernels of `triton` on the batches of an expert-parallel dispatch.

    Results are bfloat16, or float32 for float16 and float32 tokens that are not quantized. Nothing
    is read on the host.
    """

    name = "triton_batched"
    experts = TritonBatchedExperts

    def supports(self, workload: Workload) -> str | None:
        """Needs a CUDA device of SM80 or newer, and triton."""
        return why_not_portable(workload)
