"""FP8 blocks through DeepGEMM's grouped GEMMs: the kernels of moequant.kernels.deepgemm."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from moequant.kernels.calls import part_tokens
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import TMA_STRIDE_BYTES, why_not_sm90
from moequant.runtime.backends.planned import PlannedExperts
from moequant.runtime.backends.routed import BatchedExperts
from moequant.runtime.backends.sm90_fp8_block import FP8_BLOCK, why_not_fp8_block

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor

    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.deepgemm.sm90_fp8_deepgemm import DeepGemmPlan
    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.workload import Workload


class DeepGemmExperts(PlannedExperts):
    """See `DeepGemm`."""

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """See `PackedExperts.kernels_for`; DeepGEMM chooses among its kernels by its rows."""
        from moequant.kernels.deepgemm.sm90_fp8_deepgemm import ALIGNMENT
        from moequant.kernels.kernel_sets import around_gemms
        from moequant.kernels.routing import max_rows

        rows = max_rows(part_tokens(tokens, topk) * topk, self.workload.experts, ALIGNMENT)
        return rows, around_gemms(tokens, topk)

    def plan(
        self, tokens: int, topk: int, arena: WorkspaceArena, dtype: torch.dtype
    ) -> DeepGemmPlan:
        """See `PlannedExperts.plan`."""
        from moequant.kernels.deepgemm.sm90_fp8_deepgemm import DeepGemmPlan

        return DeepGemmPlan(self.tensors, self.workload.act_fn, tokens, topk, arena)


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
    formats: ClassVar[tuple[str, ...]] = FP8_BLOCK
    experts: ClassVar[type[PackedExperts]] = DeepGemmExperts
    multiples = (TMA_STRIDE_BYTES, TMA_STRIDE_BYTES)

    def supports(self, workload: Workload) -> str | None:
        """Needs fp8_block, its activations, H and I in 16s, SM90, deep_gemm and nvcc."""
        reason = why_not_fp8_block(workload)
        return _why_not_on(workload.device) if reason is None else reason


class DeepGemmBatchedExperts(BatchedExperts):
    """See `DeepGemmBatched`."""

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """See `BatchedExperts.run_batches`; bfloat16."""
        from moequant.kernels.deepgemm.sm90_fp8_deepgemm import batched_experts

        act_fn, scale = self.workload.act_fn, tokens.scale
        assert scale is not None
        return batched_experts(self.tensors, act_fn, tokens.qdata, scale, tokens.counts)


class DeepGemmBatched(DeepGemm):
    """DeepGEMM's masked layout."""

    name = "deepgemm_batched"
    experts = DeepGemmBatchedExperts


@cache
def _why_not_on(device: torch.device) -> str | None:
    return why_not_sm90(device) or why_no_deep_gemm()


def why_no_deep_gemm(*functions: str) -> str | None:
    """Why deep_gemm's kernels cannot be compiled here; None if they can.

    Args:
        functions: those that not every release of it has.
    """
    for package in ("triton", "deep_gemm"):
        # A wheel made for another torch fails in ways of its own.
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError:
            return f"needs the package {package}"
        except Exception as error:
            return f"cannot import {package}: {str(error).splitlines()[0]}"
    missing = [name for name in functions if not hasattr(module, name)]
    if missing:
        return f"needs a newer deep_gemm: this one has no {' and no '.join(missing)}"
    if not (shutil.which("nvcc") or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        return "needs nvcc, with which deep_gemm compiles: set CUDA_HOME"
    return None
