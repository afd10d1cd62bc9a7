"""FP8 blocks on Hopper: the kernels of moequant.kernels.fp8_block, four launches a call."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from moequant.kernels.cuda_driver import why_no_compiler
from moequant.layouts.gate_up import stack_gate_up
from moequant.runtime.act_fn import SILU
from moequant.runtime.backends.base import FusedBackend, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime.weights import ExpertWeights

_ROW_MULTIPLE = 16  # bytes: the stride between rows that TMA reads


class Sm90Fp8Block(FusedBackend):
    """FP8 GEMMs with activations in FP8 groups of 128, quantized as `quantize_activations` does.

    An expert's result is rounded to bfloat16, whatever the dtype of the hidden states; the sum over
    a token's slots is float32. Runs of one call are bitwise equal. Nothing is read on the host: an
    id that is out of range contributes nothing, like -1, and raises no error.
    """

    name = "sm90_fp8_block"
    default_on = ("cuda",)

    def supports(self, workload: Workload) -> str | None:
        """Wants fp8_block, its activations, H and I in 16s, SM90, triton and NVRTC."""
        if workload.format != "fp8_block":
            return "runs fp8_block alone"
        if workload.activations != "fp8_group128":
            return "multiplies by activations in fp8_group128 alone"
        if workload.act_fn != SILU or workload.bias:
            return "computes silu without biases alone"
        for name, size in (("H", workload.hidden), ("I", workload.intermediate)):
            if size % _ROW_MULTIPLE:
                return f"wants {name} a multiple of {_ROW_MULTIPLE}"
        if workload.experts == 0:
            return "wants at least one expert"
        if workload.device.type != "cuda":
            return "wants a CUDA device"
        return _why_not_on(workload.device)

    def pack(self, weights: ExpertWeights) -> object:
        """Stack gate over up; a copy of both, the rest is as it was."""
        from moequant.kernels.fp8_block.experts import Fp8BlockWeights

        w13 = stack_gate_up(weights.gate, weights.up)
        return Fp8BlockWeights(
            w13=w13.qdata,
            w13_scale=w13.scale,
            w2=weights.down.qdata.contiguous(),
            w2_scale=weights.down.scale.contiguous(),
        )

    def forward(
        self,
        packed: object,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        workspace: Tensor,
    ) -> Tensor:
        """See `FusedBackend.forward`."""
        from moequant.kernels.fp8_block.experts import Fp8BlockWeights, fused_experts

        assert isinstance(packed, Fp8BlockWeights)
        x = hidden_states
        if apply_router_weight_on_input:
            x = x.float() * topk_weights.float()
            topk_weights = torch.ones_like(topk_weights)
        out = fused_experts(packed, x, topk_ids, topk_weights, expert_map=expert_map)
        return out.to(hidden_states.dtype)


@cache
def _why_not_on(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "finds no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"wants compute capability 9.0, and {device} has {major}.{minor}"
    if find_spec("triton") is None:
        return "wants the package triton"
    return why_no_compiler()
