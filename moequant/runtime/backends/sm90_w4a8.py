"""W4A8 on Hopper: the kernels of moequant.kernels.sm90_w4a8, five launches a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight
from moequant.kernels.sm90_w4a8 import layout
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import why_not_sm90_nvrtc
from moequant.runtime.backends.layout import Layout
from moequant.runtime.backends.sm90 import Sm90Experts
from moequant.runtime.backends.stacked import stack_biases, unstack_biases
from moequant.runtime.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from moequant.runtime.backends.base import PackedExperts
    from moequant.runtime.workload import Workload


class W4a8Panels(Layout):
    """Codes and scales in the order in which the kernels' threads read them.

    w13_panels  uint8 [E, panels, H / 128, PANEL_BYTES]  gate and up, or up alone
    w2_panels   uint8 [E, panels, I / 128, PANEL_BYTES]
    w13_bias    float32 [E, 2 * I], gate over up, or [E, I]
    w2_bias     float32 [E, H]

    As many bytes as the codes and scales have, but for half a panel where H / 128 is odd;
    `moequant.kernels.sm90_w4a8.layout` describes a panel.
    """

    name = "w4a8_panels"
    version = 1

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """See `Layout.pack`."""
        if weights.format != "w4a8":
            raise UnsupportedError(
                f"the layout {self.name} holds w4a8, but these weights are {weights.format}; "
                "use another backend"
            )
        gate, up, down = weights.gate, weights.up, weights.down
        if gate is None:
            w13 = layout.pack(up.qdata, up.scale)
        else:
            w13 = layout.pack(gate.qdata, gate.scale, (up.qdata, up.scale))
        biases = stack_biases(weights, weights.intermediate)
        return {"w13_panels": w13, "w2_panels": layout.pack(down.qdata, down.scale), **biases}

    def unpack(self, tensors: Mapping[str, Tensor], workload: Workload) -> ExpertWeights:
        """See `Layout.unpack`; codes and scales are copies."""
        E, I, H = workload.experts, workload.intermediate, workload.hidden
        gated = workload.act_fn.gated
        w13 = layout.unpack(tensors["w13_panels"], I, gated=gated)
        (w2,) = layout.unpack(tensors["w2_panels"], H, gated=False)
        names = ("gate", "up", "down") if gated else ("up", "down")
        parts = {
            name: QuantizedWeight(
                format="w4a8",
                qdata=qdata,
                scale=scale,
                global_scale=None,
                shape=torch.Size((E, H, I) if name == "down" else (E, I, H)),
            )
            for name, (qdata, scale) in zip(names, [*w13, w2], strict=True)
        }
        biases = unstack_biases(tensors, I, gated=gated)
        return ExpertWeights.of(parts, workload.act_fn, **biases)


class Sm90W4a8(Backend):
    """INT4 x FP8 GEMMs: codes decoded to E4M3 in registers, scales applied to sums in float32.

    So a weight counts as its code times its scale, exactly. Activations are quantized to FP8 per
    token, hidden states as `quantize_activations` does. The result of the activation function is
    rounded to bfloat16 before that, as is an expert's result, whatever the dtype of the hidden
    states; the sum over a token's experts is float32. Every activation function, with biases or
    without. Runs of one call are bitwise equal. Nothing is read on the host: an id that is out of
    range contributes nothing, like -1, and raises no error.
    """

    name = "sm90_w4a8"
    default_on = ("cuda",)
    layout = W4a8Panels()

    def supports(self, workload: Workload) -> str | None:
        """Needs w4a8, its activations, SM90, triton and NVRTC."""
        if workload.format != "w4a8":
            return "runs only w4a8"
        if workload.activations != "fp8_token":
            return "takes only activations in fp8_token"
        if workload.experts == 0:
            return "needs at least one expert"
        if workload.device.type != "cuda":
            return "needs a CUDA device"
        return why_not_sm90_nvrtc(workload.device)

    def serves(self, target: str) -> Collection[str]:
        """See `Backend.serves`."""
        return ("w4a8",) if target == "sm90" else ()

    def load(self, tensors: Mapping[str, Tensor], workload: Workload) -> PackedExperts:
        """See `Backend.load`."""
        from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import W4a8Weights

        weights = W4a8Weights(
            w13=tensors["w13_panels"],
            w2=tensors["w2_panels"],
            hidden=workload.hidden,
            intermediate=workload.intermediate,
            bias13=tensors.get("w13_bias"),
            bias2=tensors.get("w2_bias"),
            act_fn=workload.act_fn,
        )
        return Sm90Experts(self, tensors, workload=workload, kernel_weights=weights)
