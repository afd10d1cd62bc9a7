"""FP8 blocks through DeepGEMM's grouped GEMMs: the kernels of moequant.kernels.deepgemm."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from typing import TYPE_CHECKING

from moequant.runtime.activations import data_and_scale
from moequant.runtime.backends.base import BatchedExpertsBackend, FusedBackend, Workload
from moequant.runtime.backends.capability import why_not_sm90
from moequant.runtime.backends.stacked import first_bias, first_weight, first_weight_once
from moequant.runtime.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.kernels.deepgemm.experts import DeepGemmWeights
    from moequant.runtime.activations import Activations
    from moequant.runtime.batched import BatchedTokens

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
    takes_quantized = True

    def supports(self, workload: Workload) -> str | None:
        """Wants fp8_block, its activations, H and I in 16s, SM90, deep_gemm and nvcc."""
        return _why_not(workload)

    def pack(self, weights: ExpertWeights, activations: str) -> object:
        """Stack gate over up: a copy of both, unless they lie so already; the rest is as it was."""
        w13, adopted = first_weight_once(weights)
        return _weights(weights, w13, adopted)

    def adopted(self, packed: object) -> ExpertWeights | None:
        """Gate and up as views into them stacked, or up into it padded; None without a copy."""
        source = _packed(packed).source
        assert source is None or isinstance(source, ExpertWeights)
        return source

    def workspace_bytes(self, packed: object, tokens: int, topk: int) -> int:
        """See `FusedBackend.workspace_bytes`."""
        from moequant.kernels.deepgemm.experts import workspace_bytes

        return workspace_bytes(_packed(packed), tokens, topk) if tokens * topk else 0

    def kernels_for(self, packed: object, tokens: int, topk: int) -> Hashable:
        """The rows that DeepGEMM is given, by which it chooses among its kernels by itself."""
        from moequant.kernels.deepgemm.experts import rows_of

        slots = tokens * topk
        return rows_of(_packed(packed), tokens, topk), slots % 16 == 0, tokens <= 64, topk

    def forward(
        self,
        packed: object,
        hidden_states: Tensor | Activations,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        expert_map: Tensor | None,
        workspace: Tensor,
    ) -> Tensor:
        """See `FusedBackend.forward`."""
        from moequant.kernels.deepgemm.experts import fused_experts

        x, scale = data_and_scale(hidden_states)
        return fused_experts(
            _packed(packed),
            x,
            topk_ids,
            topk_weights,
            expert_map=expert_map,
            workspace=workspace,
            hidden_scale=scale,
        )


class DeepGemmBatched(BatchedExpertsBackend):
    """DeepGEMM's masked layout.

    Gate and up are stacked anew in every call, unless they lie so already, as `deepgemm` leaves
    them.
    """

    name = "deepgemm_batched"
    default_on = ()

    def supports(self, workload: Workload) -> str | None:
        """Wants fp8_block, its activations, H and I in 16s, SM90, deep_gemm and nvcc."""
        return _why_not(workload)

    def run(self, tokens: BatchedTokens, weights: ExpertWeights) -> Tensor:
        """See `BatchedExpertsBackend.run`; bfloat16."""
        from moequant.kernels.deepgemm.experts import batched_experts

        assert tokens.scale is not None
        return batched_experts(
            _weights(weights, first_weight(weights)), tokens.qdata, tokens.scale, tokens.counts
        )


def _packed(packed: object) -> DeepGemmWeights:
    from moequant.kernels.deepgemm.experts import DeepGemmWeights

    assert isinstance(packed, DeepGemmWeights)
    return packed


def _weights(
    weights: ExpertWeights, w13: QuantizedWeight, source: ExpertWeights | None = None
) -> DeepGemmWeights:
    from moequant.kernels.deepgemm.experts import DeepGemmWeights

    act_fn = weights.act_fn
    return DeepGemmWeights(
        w13=w13.qdata,
        w13_scale=w13.scale,
        w2=weights.down.qdata.contiguous(),
        w2_scale=weights.down.scale.contiguous(),
        act_fn=act_fn,
        bias13=first_bias(weights, w13.shape[1] // (2 if act_fn.gated else 1)),
        bias2=None if weights.down_bias is None else weights.down_bias.float().contiguous(),
        source=source,
    )


def _why_not(workload: Workload) -> str | None:
    if workload.format != "fp8_block":
        return "runs fp8_block alone"
    if workload.activations != "fp8_group128":
        return "multiplies by activations in fp8_group128 alone"
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
