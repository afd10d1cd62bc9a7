"""MXFP4 weights by MXFP8 activations through DeepGEMM's grouped GEMMs, on SM100."""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from moequant.formats.mxfp4 import Mxfp4
from moequant.layouts.deepgemm_scale import pack_ue8m0, unpack_ue8m0
from moequant.runtime.activations import MXFP8
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import (
    why_not_capable,
    why_not_kernels_for,
    why_not_multiples,
)
from moequant.runtime.backends.deepgemm import why_no_deep_gemm
from moequant.runtime.backends.planned import PlannedExperts
from moequant.runtime.backends.routed import BatchedExperts
from moequant.runtime.backends.stacked_scales import StackedScales

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from torch import Tensor

    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.deepgemm.sm100_fp4_deepgemm import DeepGemmFp4Plan
    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.backends.layout import Layout
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.workload import Workload

_COLUMNS_MULTIPLE = 128
"""Of FP4, DeepGEMM's TMA loads 128 columns at a time, and none of a row that ends within them."""
_GEMMS = ("m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_masked")


class StackedWords(StackedScales):
    """`stacked`, with scales four to an int32: [E, groups / 4, rows], see `deepgemm_scale`."""

    name = "stacked_words"
    version = 1
    formats = (Mxfp4.name,)
    multiple = _COLUMNS_MULTIPLE

    def encode(self, scale: Tensor, name: str) -> Tensor:
        """See `StackedScales.encode`."""
        return pack_ue8m0(scale, scale.shape[1], block_n=1, name=name)

    def decode(self, encoded: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """See `StackedScales.decode`."""
        dtype = torch.float8_e8m0fnu
        return unpack_ue8m0(encoded, rows, columns, block_n=1, dtype=dtype, name=name)


class DeepGemmFp4Experts(PlannedExperts):
    """See `DeepGemmFp4`."""

    takes_quantized = False

    @cached_property
    def _alignment(self) -> int:
        """DeepGEMM's, when these experts first need it: buffers depend on it."""
        from moequant.kernels.deepgemm.library import row_alignment

        return row_alignment()

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """See `PackedExperts.kernels_for`; DeepGEMM's kernel is the same for any number of rows."""
        from moequant.kernels.kernel_sets import around_gemms

        return around_gemms(tokens, topk)

    def plan(
        self, tokens: int, topk: int, arena: WorkspaceArena, dtype: torch.dtype
    ) -> DeepGemmFp4Plan:
        """See `PlannedExperts.plan`."""
        from moequant.kernels.deepgemm.sm100_fp4_deepgemm import DeepGemmFp4Plan

        return DeepGemmFp4Plan(
            self.tensors, self.workload.act_fn, self._alignment, tokens, topk, arena
        )


class DeepGemmFp4BatchedExperts(BatchedExperts):
    """See `DeepGemmFp4Batched`."""

    takes_quantized = False

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """See `BatchedExperts.run_batches`."""
        from moequant.kernels.deepgemm.sm100_fp4_deepgemm import batched_experts

        hidden, counts = tokens.qdata.contiguous(), tokens.counts.contiguous()
        return batched_experts(self.tensors, self.workload.act_fn, hidden, counts)


class DeepGemmFp4(Backend):
    """DeepGEMM's FP8 by FP4 GEMMs over each expert's rows, as vLLM's DeepGemmFP4Experts.

    Activations are quantized as `quantize_activations` does, in groups of 32 columns, where vLLM's
    have 128. What the first GEMM computes is rounded to bfloat16 before the activation function,
    and so is an expert's result. Nothing is read on the host: an id that is out of range
    contributes nothing, like -1, and raises no error.

    Runs only when named: it was compiled, and never run on a GPU.
    """

    name = "deepgemm_fp4"
    never_run = True
    formats: ClassVar[tuple[str, ...]] = (Mxfp4.name,)
    layout: ClassVar[Layout] = StackedWords()
    experts: ClassVar[type[PackedExperts]] = DeepGemmFp4Experts
    multiples = (_COLUMNS_MULTIPLE, _COLUMNS_MULTIPLE)

    def supports(self, workload: Workload) -> str | None:
        """Needs MXFP4, activations in MXFP8, H and I in 128s, SM100, triton, deep_gemm and nvcc."""
        return (
            why_not_kernels_for(workload, self.formats, activations=(MXFP8,))
            or why_not_multiples(workload, self.multiples)
            or _why_not_on(workload.device)
        )

    def serves(self, target: str, activations: str) -> Collection[str]:
        """See `Backend.serves`."""
        return (Mxfp4.name,) if (target, activations) == ("sm100", MXFP8) else ()


class DeepGemmFp4Batched(DeepGemmFp4):
    """DeepGEMM's masked GEMM over batches of tokens that are not quantized.

    Counts stay on the device. Results are bfloat16, or float32 where down has biases.
    """

    name = "deepgemm_fp4_batched"
    experts = DeepGemmFp4BatchedExperts


@cache
def _why_not_on(device: torch.device) -> str | None:
    # DeepGEMM has one kernel for both.
    suits = ((10, 0), (10, 3))
    reason = why_not_capable(device, "10.0 or 10.3", lambda capability: capability in suits)
    return reason or why_no_deep_gemm(*_GEMMS)
