"""FP8 blocks through DeepGEMM's grouped GEMMs: the kernels of moequant.kernels.deepgemm."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from typing import TYPE_CHECKING

from moequant.layouts.gate_up import stack_gate_up
from moequant.runtime.backends.base import BatchedExpertsBackend, FusedBackend, Workload
from moequant.runtime.backends.capability import why_not_sm90
from moequant.runtime.backends.triton_portable import act_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor

    from moequant.kernels.deepgemm.experts import DeepGemmWeights
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.weights import ExpertWeights

_ROW_MULTIPLE = 16  # bytes: the stride between rows that TMA reads


class DeepGemm(FusedBackend):
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
        """Wants fp8_block, its activations, a gated function, SM90, deep_gemm and nvcc."""
        return _why_not(workload)

    def pack(self, weights: ExpertWeights, activations: str) -> object:
        """Stack gate over up; a copy of both, the rest is as it was."""
        return _packed(weights)

    def kernels_for(self, packed: object, tokens: int, topk: int) -> Hashable:
        """The next power of two of the slots: DeepGEMM chooses among its kernels by itself."""
        slots = tokens * topk
        return (slots - 1).bit_length(), slots % 16 == 0, topk

    def forward(
        self,
        packed: object,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        expert_map: Tensor | None,
        workspace: Tensor,
    ) -> Tensor:
        """See `FusedBackend.forward`."""
        from moequant.kernels.deepgemm.experts import DeepGemmWeights, fused_experts

        assert isinstance(packed, DeepGemmWeights)
        return fused_experts(packed, hidden_states, topk_ids, topk_weights, expert_map=expert_map)


class DeepGemmBatched(BatchedExpertsBackend):
    """DeepGEMM's masked layout. Gate and up are stacked anew in every call, so it is for tests."""

    name = "deepgemm_batched"
    default_on = ()

    def supports(self, workload: Workload) -> str | None:
        """Wants fp8_block, its activations, a gated function, SM90, deep_gemm and nvcc."""
        return _why_not(workload)

    def run(self, tokens: BatchedTokens, weights: ExpertWeights) -> Tensor:
        """See `BatchedExpertsBackend.run`; bfloat16."""
        from moequant.kernels.deepgemm.experts import batched_experts

        assert tokens.scale is not None
        return batched_experts(_packed(weights), tokens.qdata, tokens.scale, tokens.counts)


def _packed(weights: ExpertWeights) -> DeepGemmWeights:
    from moequant.kernels.deepgemm.experts import DeepGemmWeights

    assert weights.gate is not None
    w13 = stack_gate_up(weights.gate, weights.up)
    return DeepGemmWeights(
        w13=w13.qdata,
        w13_scale=w13.scale,
        w2=weights.down.qdata.contiguous(),
        w2_scale=weights.down.scale.contiguous(),
        act=act_of(weights.act_fn),
    )


def _why_not(workload: Workload) -> str | None:
    if workload.format != "fp8_block":
        return "runs fp8_block alone"
    if workload.activations != "fp8_group128":
        return "multiplies by activations in fp8_group128 alone"
    if workload.bias or not workload.act_fn.gated:
        return "computes gated functions without biases alone"
    for name, size in (("H", workload.hidden), ("I", workload.intermediate)):
        if size % _ROW_MULTIPLE:
            return f"wants {name} a multiple of {_ROW_MULTIPLE}"
    if workload.experts == 0:
        return "wants at least one expert"
    if workload.device.type != "cuda":
        return "wants a CUDA device"
    return _why_not_on(workload.device)


@cache
def _why_not_on(device: torch.device) -> str | None:
    if (reason := why_not_sm90(device)) is not None:
        return reason
    for package in ("triton", "deep_gemm"):
        # A wheel made for another torch fails in ways of its own.
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            return f"wants the package {package}"
        except Exception as error:
            return f"cannot import {package}: {str(error).splitlines()[0]}"
    if not (shutil.which("nvcc") or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        return "wants nvcc, with which deep_gemm compiles: set CUDA_HOME"
    return None
