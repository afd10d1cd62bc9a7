"""Every format on any CUDA device from SM80 on: the kernels of moequant.kernels.portable."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from moequant.kernels.portable.weights import KINDS, Experts, projection
from moequant.runtime.activations import SCHEMES, data_and_scale
from moequant.runtime.backends.base import FusedBackend, Workload
from moequant.runtime.backends.capability import why_not_capable

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.kernels.portable.weights import Projection
    from moequant.runtime.activations import Activations
    from moequant.runtime.weights import ExpertWeights

_CAPABILITY = (8, 0)  # of BF16 tensor cores


class TritonPortable(FusedBackend):
    """Weights decoded in registers, products exact in BF16, sums in float32.

    So it differs from the reference by the order of sums, and by what lies between the GEMMs: where
    that is not quantized, it is rounded to bfloat16 for bfloat16 hidden states, as is an expert's
    result, and is float32 for others. Hidden states that are not quantized are multiplied as they
    are: float16 in two passes of the tensor cores, float32 in three. Runs of one call are bitwise
    equal. Nothing is read on the host: an id that is out of range contributes nothing, like -1, and
    raises no error. Weights stay as they are, without a copy.
    """

    name = "triton"
    default_on = ("cuda",)
    takes_quantized = True

    def supports(self, workload: Workload) -> str | None:
        """Wants a CUDA device of SM80 or newer, and triton."""
        return why_not_portable(workload)

    def pack(self, weights: ExpertWeights, activations: str) -> object:
        """Views."""
        return portable_experts(weights, activations)

    def workspace_bytes(self, packed: object, tokens: int, topk: int) -> int:
        """As for float32 hidden states, which take most."""
        from moequant.kernels.portable.experts import workspace_bytes

        assert isinstance(packed, Experts)
        return workspace_bytes(packed, tokens, topk, torch.float32) if tokens * topk else 0

    def kernels_for(self, packed: object, tokens: int, topk: int) -> Hashable:
        """See `FusedBackend.kernels_for`."""
        from moequant.kernels.portable.experts import kernels_for

        assert isinstance(packed, Experts)
        return kernels_for(packed, tokens, topk)

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
        from moequant.kernels.portable.experts import fused_experts

        assert isinstance(packed, Experts)
        x, scale = data_and_scale(hidden_states)
        return fused_experts(
            packed,
            x,
            topk_ids,
            topk_weights,
            expert_map=expert_map,
            workspace=workspace,
            hidden_scale=scale,
        )


def why_not_portable(workload: Workload) -> str | None:
    """Why the kernels do not run `workload`; None where they do."""
    if workload.format not in KINDS:
        return f"cannot decode {workload.format}"
    if workload.activations not in SCHEMES:
        return f"cannot quantize activations to {workload.activations}"
    if workload.experts == 0:
        return "wants at least one expert"
    if workload.device.type != "cuda":
        return "wants a CUDA device"
    return _why_not_on(workload.device)


def portable_experts(weights: ExpertWeights, activations: str) -> Experts:
    """The weights as `moequant.kernels.portable` takes them: views."""

    def part(q: QuantizedWeight, bias: Tensor | None) -> Projection:
        return projection(q.format, q.qdata, q.scale, q.global_scale, bias)

    static = activations == "fp8_static"
    return Experts(
        gate=None if weights.gate is None else part(weights.gate, weights.gate_bias),
        up=part(weights.up, weights.up_bias),
        down=part(weights.down, weights.down_bias),
        act_fn=weights.act_fn,
        # What differs is the quantization alone.
        activations="fp8_token" if static else activations,
        up_static=weights.static_scale("gate_up") if static else None,
        down_static=weights.static_scale("down") if static else None,
    )


@cache
def _why_not_on(device: torch.device) -> str | None:
    reason = why_not_capable(device, "8.0 or more", lambda capability: capability >= _CAPABILITY)
    if reason is not None:
        return reason
    if find_spec("triton") is None:
        return "wants the package triton"
    return None
