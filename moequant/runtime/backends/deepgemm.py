"""FP8 blocks through DeepGEMM's grouped GEMMs: the kernels of moequant.kernels.deepgemm."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from typing import TYPE_CHECKING

from moequant.runtime.backends.base import Backend, PackedExperts
from moequant.runtime.backends.batched import BatchedExperts
from moequant.runtime.backends.capability import why_not_sm90
from moequant.runtime.backends.sm90_fp8_block import why_not_fp8_block

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    import torch
    from torch import Tensor

    from moequant.kernels.deepgemm.sm90_fp8_deepgemm import DeepGemmWeights
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.workload import Workload


class DeepGemm(Backend):
    """DeepGEMM's contiguous layout, each expert's rows from a multiple of 128 on.

    Activations are FP8 in groups of 128, quantized as `quantize_activations` does; what the first
    GEMM computes is rounded to bfloat16 before the activation function, and so is an expert's
    result. Runs of one call are bitwise equal. Nothing is read on the host: an id that is out of
    range contributes nothing, like -1, and raises no error.

    Runs only when named: 128 rows for every expert cost more than `sm90_fp8_block` wherever the two
    were timed but for one size.
    """

    name = "deepgemm"
    default_on = ()

    def supports(self, workload: Workload) -> str | None:
        """Wants fp8_block, its activations, H and I in 16s, SM90, deep_gemm and nvcc."""
        reason = why_not_fp8_block(workload)
        return _why_not_on(workload.device) if reason is None else reason

    def load(self, tensors: Mapping[str, Tensor], workload: Workload) -> PackedExperts:
        """See `Backend.load`."""
        return DeepGemmExperts(self, tensors, workload=workload)


class DeepGemmExperts(PackedExperts):
    """See `DeepGemm`."""

    def __init__(
        self, backend: Backend, tensors: Mapping[str, Tensor], *, workload: Workload
    ) -> None:
        super().__init__(backend, tensors, workload=workload)
        self.kernel_weights = _weights(tensors, workload)

    def workspace_bytes(self, tokens: int, topk: int) -> int:
        """See `PackedExperts.workspace_bytes`."""
        from moequant.kernels.deepgemm.sm90_fp8_deepgemm import workspace_bytes

        return workspace_bytes(self.kernel_weights, tokens, topk) if tokens * topk else 0

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """The rows that DeepGEMM is given, by which it chooses among its kernels by itself."""
        from moequant.kernels.deepgemm.sm90_fp8_deepgemm import rows_of

        pairs = tokens * topk
        return rows_of(self.kernel_weights, tokens, topk), pairs % 16 == 0, tokens <= 64, topk

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
        from moequant.kernels.deepgemm.sm90_fp8_deepgemm import fused_experts

        fused_experts(
            self.kernel_weights,
            hidden_states,
            topk_weights,
            topk_ids,
            out=out,
            workspace=workspace,
            expert_map=expert_map,
            hidden_scale=hidden_scale,
        )


class DeepGemmBatched(Backend):
    """DeepGEMM's masked layout."""

    name = "deepgemm_batched"
    default_on = ()

    def supports(self, workload: Workload) -> str | None:
        """As `DeepGemm`."""
        reason = why_not_fp8_block(workload)
        return _why_not_on(workload.device) if reason is None else reason

    def load(self, tensors: Mapping[str, Tensor], workload: Workload) -> PackedExperts:
        """See `Backend.load`."""
        return DeepGemmBatchedExperts(self, tensors, workload=workload)


class DeepGemmBatchedExperts(BatchedExperts):
    """See `DeepGemmBatched`."""

    def __init__(
        self, backend: Backend, tensors: Mapping[str, Tensor], *, workload: Workload
    ) -> None:
        super().__init__(backend, tensors, workload=workload)
        self.kernel_weights = _weights(tensors, workload)

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """See `BatchedExperts.run_batches`; bfloat16."""
        from moequant.kernels.deepgemm.sm90_fp8_deepgemm import batched_experts

        assert tokens.scale is not None
        return batched_experts(self.kernel_weights, tokens.qdata, tokens.scale, tokens.counts)


def _weights(tensors: Mapping[str, Tensor], workload: Workload) -> DeepGemmWeights:
    from moequant.kernels.deepgemm.sm90_fp8_deepgemm import DeepGemmWeights

    return DeepGemmWeights(
        w13=tensors["w13_qdata"],
        w13_scale=tensors["w13_scale"],
        w2=tensors["w2_qdata"],
        w2_scale=tensors["w2_scale"],
        act_fn=workload.act_fn,
        bias13=tensors.get("w13_bias"),
        bias2=tensors.get("w2_bias"),
    )


@cache
def _why_not_on(device: torch.device) -> str | None:
    if (reason := why_not_sm90(device)) is not None:
        return reason
    for package in ("triton", "deep_gemm"):
        # A wheel made for another torch fails in ways of its own.
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            return f"needs the package {package}"
        except Exception as error:
            return f"cannot import {package}: {str(error).splitlines()[0]}"
    if not (shutil.which("nvcc") or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        return "needs nvcc, with which deep_gemm compiles: set CUDA_HOME"
    return None
