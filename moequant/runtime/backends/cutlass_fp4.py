"""FP4 weights by FP4 activations, through CUTLASS on SM100: kernels of moequant.kernels.cutlass."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar

from moequant.kernels.cutlass.sm100_fp4_variant import VARIANTS
from moequant.layouts.swizzle_128x4 import swizzle, unswizzle
from moequant.runtime.activations import MXFP4, NVFP4, NVFP4_STATIC
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import (
    why_no_triton,
    why_not_capable,
    why_not_kernels_for,
    why_not_multiples,
)
from moequant.runtime.backends.cutlass_fp8 import why_no_cute_dsl
from moequant.runtime.backends.planned import PlannedExperts
from moequant.runtime.backends.routed import BatchedExperts
from moequant.runtime.backends.stacked_scales import StackedScales

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    import torch
    from torch import Tensor

    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.cutlass.sm100_fp4_fused import Fp4Plan
    from moequant.kernels.cutlass.sm100_fp4_variant import Fp4Variant
    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.backends.layout import Layout
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.workload import Workload

_VARIANTS = {variant.name: variant for variant in VARIANTS}
_COLUMNS_MULTIPLE = 32  # codes of 16 bytes: the stride between rows that TMA reads


def _activations_of(variant: Fp4Variant) -> tuple[str, ...]:
    """The schemes whose codes and scales are those of the weights."""
    return (NVFP4, NVFP4_STATIC) if variant.e4m3_scales else (MXFP4,)


class StackedTiles(StackedScales):
    """`stacked`, with scales in 128x4 tiles: [E, ceil128(rows), ceil4(groups)], by expert."""

    name = "stacked_tiles"
    version = 1
    formats = tuple(_VARIANTS)
    multiple = _COLUMNS_MULTIPLE

    def encode(self, scale: Tensor, name: str) -> Tensor:
        """See `StackedScales.encode`."""
        return swizzle(scale)

    def decode(self, encoded: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """See `StackedScales.decode`."""
        return unswizzle(encoded, rows, columns, name=name)


class CutlassFp4Experts(PlannedExperts):
    """See `CutlassFp4`."""

    takes_quantized = False

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """See `PackedExperts.kernels_for`; the GEMMs' kernel is the same for any number of rows."""
        from moequant.kernels.kernel_sets import around_gemms

        return around_gemms(tokens, topk)

    def plan(self, tokens: int, topk: int, arena: WorkspaceArena, dtype: torch.dtype) -> Fp4Plan:
        """See `PlannedExperts.plan`."""
        from moequant.kernels.cutlass.sm100_fp4_fused import Fp4Plan

        variant = _VARIANTS[self.workload.format]
        return Fp4Plan(variant, self.tensors, self.workload.act_fn, tokens, topk, arena)


class CutlassFp4BatchedExperts(BatchedExperts):
    """See `CutlassFp4Batched`."""

    takes_quantized = False

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        """See `BatchedExperts.run_batches`."""
        from moequant.kernels.cutlass.sm100_fp4_fused import batched_experts

        variant, hidden = _VARIANTS[self.workload.format], tokens.qdata.contiguous()
        return batched_experts(
            variant, self.tensors, self.workload.act_fn, hidden, tokens.counts.contiguous()
        )


class CutlassFp4(Backend):
    """Block-scaled FP4 GEMMs in CuTe DSL, as vLLM's CutlassExpertsFp4 and CutlassExpertsMxfp4.

    Activations are quantized as `quantize_activations` does. What the first GEMM computes is
    rounded to bfloat16 before the activation function, and so is an expert's result. Nothing is
    read on the host: an id that is out of range contributes nothing, like -1, and raises no error.

    Runs only when named: it was compiled, and never run on a GPU.
    """

    name = "cutlass_fp4"
    never_run = True
    formats: ClassVar[tuple[str, ...]] = tuple(_VARIANTS)
    layout: ClassVar[Layout] = StackedTiles()
    experts: ClassVar[type[PackedExperts]] = CutlassFp4Experts
    multiples = (_COLUMNS_MULTIPLE, _COLUMNS_MULTIPLE)

    def supports(self, workload: Workload) -> str | None:
        """Needs FP4 with its own activations, H and I in 32s, SM100, triton and CuTe DSL."""
        variant = _VARIANTS.get(workload.format)
        wanted = () if variant is None else tuple(_activations_of(variant))
        return (
            why_not_kernels_for(workload, self.formats, activations=wanted)
            or why_not_multiples(workload, self.multiples)
            or _why_not_on(workload.device)
        )

    def serves(self, target: str, activations: str) -> Collection[str]:
        """See `Backend.serves`."""
        if target != "sm100":
            return ()
        return [name for name, v in _VARIANTS.items() if activations in _activations_of(v)]


class CutlassFp4Batched(CutlassFp4):
    """The same GEMM over batches of tokens that are not quantized; their counts stay on the device.

    The experts quantize, because scales of FP4 lie by tiles of the rows in use. Results are
    bfloat16, or float32 where down has biases.
    """

    name = "cutlass_fp4_batched"
    experts = CutlassFp4BatchedExperts


@cache
def _why_not_on(device: torch.device) -> str | None:
    reason = why_not_capable(device, "10.0", lambda capability: capability == (10, 0))
    return reason or why_no_triton() or why_no_cute_dsl()
