"""FP8 weights with a scale per row or matrix on Hopper: moequant.kernels.sm90_fp8_channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moequant.runtime.activations import FP8_TENSOR
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import (
    why_not_kernels_for,
    why_not_multiples,
    why_not_sm90_nvrtc,
)
from moequant.runtime.backends.sm90 import Sm90Experts, common_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.workload import Workload

_ACTIVATIONS = ("fp8_token", FP8_TENSOR, "fp8_static")


class Sm90Fp8Channel(Backend):
    """FP8 x FP8 GEMMs: scales of weight rows and of tokens are applied to the sums in float32.

    Activations are quantized to FP8 per token; or with the static scales that came with the
    weights, which takes up to two launches more; or with one scale of all tokens, which takes up to
    six more. Hidden states are, as `quantize_activations` does. The
    result of the activation function is rounded to bfloat16 before that, as is an expert's result,
    whatever the dtype of the hidden states; the sum over a token's experts is float32. Every
    activation function, with biases or without. Nothing is read on the host: an id that is out of
    range contributes nothing, like -1, and raises no error.
    """

    name = "sm90_fp8_channel"
    default_on = ("cuda",)
    formats: ClassVar[tuple[str, ...]] = ("fp8_channel", "fp8_tensor")
    multiples = (32, 16)

    def supports(self, workload: Workload) -> str | None:
        """Needs a format of its own, FP8 activations, sizes for TMA, SM90, triton and NVRTC."""
        reason = why_not_kernels_for(workload, self.formats, activations=_ACTIVATIONS)
        return reason or _why_not_sizes(workload) or why_not_sm90_nvrtc(workload.device)

    def load(self, tensors: Mapping[str, Tensor], workload: Workload) -> PackedExperts:
        """See `Backend.load`."""
        from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import Fp8ChannelWeights

        static = workload.activations == "fp8_static"
        scale_of = self.layout.unpack(tensors, workload).static_scale
        weights = Fp8ChannelWeights(
            w13=tensors["w13_qdata"],
            w13_scale=tensors["w13_scale"],
            w2=tensors["w2_qdata"],
            w2_scale=tensors["w2_scale"],
            **common_fields(tensors, workload),
            static13=scale_of("gate_up") if static else None,
            static2=scale_of("down") if static else None,
            tensor_scale=workload.activations == FP8_TENSOR,
        )
        return Sm90Experts(self, tensors, workload=workload, kernel_weights=weights)


def _why_not_sizes(workload: Workload) -> str | None:
    """Why the kernels do not take H or I; None if they do.

    A warp has 32 rows of a weight, or 16 of gate and up each, and TMA reads rows at multiples of 16
    bytes.
    """
    hidden, rows = Sm90Fp8Channel.multiples
    return why_not_multiples(workload, (hidden, rows if workload.act_fn.gated else 2 * rows))
