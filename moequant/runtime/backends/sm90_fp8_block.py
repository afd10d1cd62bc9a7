"""FP8 blocks on Hopper: the kernels of moequant.kernels.fp8_block, four launches a call."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from moequant.kernels.cuda_driver import why_no_compiler
from moequant.runtime.activations import data_and_scale
from moequant.runtime.backends.base import FusedBackend, Workload
from moequant.runtime.backends.capability import why_not_sm90
from moequant.runtime.backends.stacked import first_bias, first_weight_once
from moequant.runtime.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor

    from moequant.kernels.fp8_block.experts import Fp8BlockWeights
    from moequant.runtime.activations import Activations

_ROW_MULTIPLE = 16  # bytes: the stride between rows that TMA reads


class Sm90Fp8Block(FusedBackend):
    """FP8 GEMMs with activations in FP8 groups of 128, quantized as `quantize_activations` does.

    Every activation function, with biases or without. An expert's result is rounded to bfloat16,
    whatever the dtype of the hidden states; the sum over a token's slots is float32. Runs of one
    call are bitwise equal. Nothing is read on the host: an id that is out of range contributes
    nothing, like -1, and raises no error.
    """

    name = "sm90_fp8_block"
    default_on = ("cuda",)
    takes_quantized = True

    def supports(self, workload: Workload) -> str | None:
        """Wants fp8_block, its activations, H and I in 16s, SM90, triton and NVRTC."""
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

    def pack(self, weights: ExpertWeights, activations: str) -> object:
        """Stack gate over up: a copy of both, unless they lie so already; the rest is as it was."""
        from moequant.kernels.fp8_block.experts import Fp8BlockWeights

        w13, adopted = first_weight_once(weights)
        return Fp8BlockWeights(
            w13=w13.qdata,
            w13_scale=w13.scale,
            w2=weights.down.qdata.contiguous(),
            w2_scale=weights.down.scale.contiguous(),
            bias13=first_bias(weights, w13.shape[1] // (2 if weights.act_fn.gated else 1)),
            bias2=None if weights.down_bias is None else weights.down_bias.float().contiguous(),
            act_fn=weights.act_fn,
            source=adopted,
        )

    def adopted(self, packed: object) -> ExpertWeights | None:
        """Gate and up as views into them stacked, or up into it padded; None without a copy."""
        source = _packed(packed).source
        assert source is None or isinstance(source, ExpertWeights)
        return source

    def workspace_bytes(self, packed: object, tokens: int, topk: int) -> int:
        """See `FusedBackend.workspace_bytes`."""
        from moequant.kernels.fp8_block.experts import workspace_bytes

        return workspace_bytes(_packed(packed), tokens, topk)

    def kernels_for(self, packed: object, tokens: int, topk: int) -> Hashable:
        """See `FusedBackend.kernels_for`."""
        from moequant.kernels.fp8_block.experts import kernels_for

        return kernels_for(_packed(packed), tokens, topk)

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
        from moequant.kernels.fp8_block.experts import fused_experts

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


def _packed(packed: object) -> Fp8BlockWeights:
    from moequant.kernels.fp8_block.experts import Fp8BlockWeights

    assert isinstance(packed, Fp8BlockWeights)
    return packed


@cache
def _why_not_on(device: torch.device) -> str | None:
    if (reason := why_not_sm90(device)) is not None:
        return reason
    if find_spec("triton") is None:
        return "wants the package triton"
    return why_no_compiler()
