"""FP8 blocks on Hopper: the kernels of moequant.kernels.sm90_fp8_block, four launches a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import (
    TMA_STRIDE_BYTES,
    why_not_kernels_for,
    why_not_multiples,
    why_not_sm90_nvrtc,
)
from moequant.runtime.backends.sm90 import Sm90Experts, common_fields

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.workload import Workload

FP8_BLOCK = ("fp8_block",)


class Sm90Fp8Block(Backend):
    """FP8 GEMMs with activations in FP8 groups of 128, quantized as `quantize_activations` does.

    Every activation function, with biases or without. An expert's result is rounded to bfloat16,
    whatever the dtype of the hidden states; the sum over a token's experts is float32. Runs of one
    call are bitwise equal. Nothing is read on the host: an id that is out of range contributes
    nothing, like -1, and raises no error.
    """

    name = "sm90_fp8_block"
    default_on = ("cuda",)
    formats: ClassVar[tuple[str, ...]] = FP8_BLOCK
    multiples = (TMA_STRIDE_BYTES, TMA_STRIDE_BYTES)

    def supports(self, workload: Workload) -> str | None:
        """Needs fp8_block, its activations, H and I in 16s, SM90, triton and NVRTC."""
        return why_not_fp8_block(workload) or why_not_sm90_nvrtc(workload.device)

    def serves(self, target: str, activations: str) -> Collection[str]:
        """See `Backend.serves`."""
        return ("fp8_block",) if (target, activations) == ("sm90", "fp8_group128") else ()

    def load(self, tensors: Mapping[str, Tensor], workload: Workload) -> PackedExperts:
        """See `Backend.load`."""
        from moequant.kernels.sm90_fp8_block.sm90_fp8_block_fused import Fp8BlockWeights

        weights = Fp8BlockWeights(
            w13=tensors["w13_qdata"],
            w13_scale=tensors["w13_scale"],
            w2=tensors["w2_qdata"],
            w2_scale=tensors["w2_scale"],
            **common_fields(tensors, workload),
        )
        return Sm90Experts(self, tensors, workload=workload, kernel_weights=weights)


def why_not_fp8_block(workload: Workload) -> str | None:
    """Why kernels that read FP8 blocks by TMA do not run `workload` on any GPU; None if they do."""
    reason = why_not_kernels_for(workload, FP8_BLOCK, activations=("fp8_group128",))
    return reason or why_not_multiples(workload, (TMA_STRIDE_BYTES, TMA_STRIDE_BYTES))
