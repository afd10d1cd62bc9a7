"""FP4 weights x bfloat16 on Hopper: the kernels of moequant.kernels.sm90_w4a16."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from moequant.errors import UnsupportedError
from moequant.kernels.sm90_w4a16 import layout
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import why_not_kernels_for, why_not_sm90_nvrtc
from moequant.runtime.backends.layout import Layout
from moequant.runtime.backends.sm90 import Sm90Experts, common_fields, weights_of_panels
from moequant.runtime.backends.stacked import name_input_scales, stack_biases

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.weights import ExpertWeights
    from moequant.runtime.workload import Workload

_FORMATS = ("nvfp4", "mxfp4")


class W4a16Panels(Layout):
    """Codes and scales in the order in which the kernels' threads read them.

    w13_panels  uint8 [E, panels, ceil(H / 128), panel_bytes]  gate and up, or up alone
    w13_factor  float32 [E, 2] of gate and up, or [E, 1]
    w2_panels   uint8 [E, panels, ceil(I / 128), panel_bytes]
    w2_factor   float32 [E, 1]
    w13_bias    float32 [E, 2 * I], gate over up, or [E, I]
    w2_bias     float32 [E, H]
    w13_input_scale, w2_input_scale  as in `stacked`

    As many bytes as the codes and scales have, but for what fills the last panel and block;
    `moequant.kernels.sm90_w4a16.layout` describes a panel.
    """

    name = "w4a16_panels"
    version = 1

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """See `Layout.pack`."""
        if weights.format not in _FORMATS:
            raise UnsupportedError(
                f"the layout {self.name} holds {' and '.join(_FORMATS)}, but these weights are "
                f"{weights.format}; use another backend"
            )
        *first, down = ((q.qdata, q.scale, q.global_scale) for q in weights.projections().values())
        w13, w13_factor = layout.pack(first)
        w2, w2_factor = layout.pack([down])
        return {
            "w13_panels": w13,
            "w13_factor": w13_factor,
            "w2_panels": w2,
            "w2_factor": w2_factor,
            **stack_biases(weights, weights.intermediate),
            **name_input_scales(weights.input_scales()),
        }

    def unpack(self, tensors: Mapping[str, Tensor], workload: Workload) -> ExpertWeights:
        """See `Layout.unpack`; codes and scales are copies."""
        I, H = workload.intermediate, workload.hidden
        w13 = layout.unpack(tensors["w13_panels"], tensors["w13_factor"], I, H)
        w2 = layout.unpack(tensors["w2_panels"], tensors["w2_factor"], H, I)
        return weights_of_panels([*w13, *w2], tensors, workload)


class Sm90W4a16(Backend):
    """NVFP4 or MXFP4 x bfloat16 GEMMs: a code times its group's scale is exact in bfloat16.

    Hidden states, the result of the activation function and an expert's result are rounded to
    bfloat16, whatever the dtype of the hidden states; sums are float32. Every activation function,
    with biases or without. Runs of one call are bitwise equal. Nothing is read on the host: an id
    that is out of range contributes nothing, like -1, and raises no error.
    """

    name = "sm90_w4a16"
    default_on = ("cuda",)
    formats: ClassVar[tuple[str, ...]] = _FORMATS
    layout = W4a16Panels()

    def supports(self, workload: Workload) -> str | None:
        """Needs nvfp4 or mxfp4, activations that are not quantized, SM90, triton and NVRTC."""
        reason = why_not_kernels_for(workload, self.formats, activations=("none",))
        return reason or why_not_sm90_nvrtc(workload.device)

    def serves(self, target: str, activations: str) -> Collection[str]:
        """See `Backend.serves`."""
        return self.formats if (target, activations) == ("sm90", "none") else ()

    def load(self, tensors: Mapping[str, Tensor], workload: Workload) -> PackedExperts:
        """See `Backend.load`."""
        from moequant.kernels.sm90_w4a16.sm90_w4a16_fused import Mxfp4Bf16Weights, W4a16Weights

        kernels = Mxfp4Bf16Weights if workload.format == "mxfp4" else W4a16Weights
        weights = kernels(
            w13=tensors["w13_panels"],
            w13_factor=tensors["w13_factor"],
            w2=tensors["w2_panels"],
            w2_factor=tensors["w2_factor"],
            **common_fields(tensors, workload),
        )
        return W4a16Experts(self, tensors, workload=workload, kernel_weights=weights)


class W4a16Experts(Sm90Experts):
    """See `Sm90W4a16`."""

    takes_quantized = False
