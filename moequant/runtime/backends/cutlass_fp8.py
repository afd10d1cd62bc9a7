"""FP8 weights with one scale a row, through CUTLASS: the kernels of moequant.kernels.cutlass."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from moequant.runtime.activations import FP8_TENSOR
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import (
    TMA_STRIDE_BYTES,
    why_not_kernels_for,
    why_not_multiples,
    why_not_sm90_triton,
)
from moequant.runtime.backends.planned import PlannedExperts
from moequant.runtime.backends.routed import BatchedExperts

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor

    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.cutlass.sm90_fp8_channel_fused import CutlassPlan
    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.workload import Workload


class CutlassFp8Experts(PlannedExperts):
    """See `CutlassFp8`."""

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """See `PackedExperts.kernels_for`."""
        from moequant.kernels.cutlass.sm90_fp8_channel_fused import kernels_for

        return kernels_for(self.workload.experts, tokens, topk)

    def plan(
        self, tokens: int, topk: int, arena: WorkspaceArena, dtype: torch.dtype
    ) -> CutlassPlan:
        """See `PlannedExperts.plan`."""
        from moequant.kernels.cutlass.sm90_fp8_channel_fused import CutlassPlan

        w = self.workload
        return CutlassPlan(
            self.tensors,
            w.act_fn,
            tokens,
            topk,
            arena,
            tensor_scale=w.activations == FP8_TENSOR,
        )


class CutlassFp8(Backend):
    """FP8 GEMMs in CuTe DSL with activations in FP8 per token, as vLLM's CutlassExpertsFp8.

    Or with one scale of all tokens, which takes up to seven launches more. Activations are
    quantized as `quantize_activations` does. The tensor cores' sums of 128 columns are added up in
    float32, and both scales multiply the sum. What the first GEMM computes is rounded to bfloat16
    before the activation function, and so is an expert's result. Runs of one call are bitwise
    equal. Nothing is read on the host: an id that is out of range contributes nothing, like -1, and
    raises no error.

    Runs only when named: `sm90_fp8_channel` is faster or as fast at nearly all sizes, see
    docs/kernels.md.
    """

    name = "cutlass_fp8"
    formats: ClassVar[tuple[str, ...]] = ("fp8_channel",)
    experts: ClassVar[type[PackedExperts]] = CutlassFp8Experts
    multiples = (TMA_STRIDE_BYTES, TMA_STRIDE_BYTES)

    def supports(self, workload: Workload) -> str | None:
        """Needs fp8_channel, its activations, H and I in 16s, SM90, triton and CuTe DSL."""
        return (
            why_not_kernels_for(workload, self.formats, activations=("fp8_token", FP8_TENSOR))
            or why_not_multiples(workload, self.multiples)
            or _why_not_on(workload.device)
        )


class CutlassFp8BatchedExperts(BatchedExperts):
    """See `CutlassFp8Batched`."""

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """See `BatchedExperts.run_batches`; bfloat16."""
        from moequant.kernels.cutlass.sm90_fp8_channel_fused import batched_experts

        assert tokens.scale is not None
        qdata, scale = tokens.qdata.contiguous(), tokens.scale.contiguous()
        return batched_experts(
            self.tensors,
            self.workload.act_fn,
            qdata,
            scale,
            tokens.counts,
            tensor_scale=tokens.scheme == FP8_TENSOR,
        )


class CutlassFp8Batched(CutlassFp8):
    """The same GEMM over batches, as vLLM's CutlassBatchedExpertsFp8."""

    name = "cutlass_fp8_batched"
    experts = CutlassFp8BatchedExperts


@cache
def _why_not_on(device: torch.device) -> str | None:
    return why_not_sm90_triton(device) or why_no_cute_dsl()


def why_no_cute_dsl() -> str | None:
    """Why CuTe DSL does not compile here, in one clause; None where it can be imported.

    It is not imported: that takes a second, and cubins on disk need none of it.
    """
    from moequant.kernels.cutlass.compiled import COMPILER

    try:
        version(COMPILER)
    except PackageNotFoundError:
        return "needs the package nvidia-cutlass-dsl: pip install 'moequant[cutlass]'"
    if find_spec("cutlass") is None:
        return f"finds {COMPILER} without its module cutlass: pip install 'moequant[cutlass]'"
    return None
