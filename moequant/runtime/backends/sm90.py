"""What the backends of kernels in `moequant.kernels.sm90` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moequant.formats import QuantizedWeight
from moequant.kernels.calls import part_tokens
from moequant.runtime.backends.base import PackedExperts
from moequant.runtime.backends.stacked import input_scales_in, unstack_biases
from moequant.runtime.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from torch import Tensor

    from moequant.kernels.sm90.weights import Sm90Weights
    from moequant.runtime.backends.base import Backend
    from moequant.runtime.workload import Workload


def weights_of_panels(
    unpacked: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    tensors: Mapping[str, Tensor],
    workload: Workload,
) -> ExpertWeights:
    """The weights of a layer in panels.

    Args:
        unpacked: codes, scale and global scale of gate, up and down, or of up and down.
        tensors: of the layout, for the biases and the static scales of activations.
        workload: says the format, the sizes and the function between the GEMMs.
    """
    E, I, H = workload.experts, workload.intermediate, workload.hidden
    gated = workload.act_fn.gated
    parts = {
        name: QuantizedWeight(
            format=workload.format,
            qdata=qdata,
            scale=scale,
            global_scale=global_scale,
            shape=torch.Size((E, H, I) if name == "down" else (E, I, H)),
        )
        for name, (qdata, scale, global_scale) in zip(
            ("gate", "up", "down") if gated else ("up", "down"), unpacked, strict=True
        )
    }
    biases = unstack_biases(tensors, I, gated=gated)
    return ExpertWeights.of(parts, workload.act_fn, **biases, **input_scales_in(tensors))


def common_fields(tensors: Mapping[str, Tensor], workload: Workload) -> dict[str, Any]:
    """The fields that `Sm90Weights` of every family have, by the names of its constructor."""
    return {
        "hidden": workload.hidden,
        "intermediate": workload.intermediate,
        "bias13": tensors.get("w13_bias"),
        "bias2": tensors.get("w2_bias"),
        "act_fn": workload.act_fn,
    }


class Sm90Experts(PackedExperts):
    """Experts that `kernel_weights` runs, which has their tilings too."""

    def __init__(
        self,
        backend: Backend,
        tensors: Mapping[str, Tensor],
        *,
        workload: Workload,
        kernel_weights: Sm90Weights,
    ) -> None:
        super().__init__(backend, tensors, workload=workload)
        self.kernel_weights = self.tuner = kernel_weights

    def workspace_bytes(self, tokens: int, topk: int) -> int:
        """See `PackedExperts.workspace_bytes`."""
        return self.kernel_weights.workspace_bytes(tokens, topk)

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """See `PackedExperts.kernels_for`."""
        return self.kernel_weights.kernels_for(tokens, topk)

    def compile_ahead(self, tokens: Iterable[int], topk: int) -> None:
        """See `PackedExperts.compile_ahead`."""
        self.kernel_weights.compile_ahead(tokens, topk)

    def run(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        out: Tensor,
        workspace: Tensor,
        expert_map: Tensor | None,
        hidden_scale: Tensor | None,
    ) -> None:
        """See `PackedExperts.run`."""
        self.kernel_weights.run(
            hidden_states,
            topk_weights,
            topk_ids,
            out=out,
            workspace=workspace,
            expert_map=expert_map,
            hidden_scale=hidden_scale,
        )

    def stages(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> dict[str, Callable[[], object]]:
        """See `PackedExperts.stages`."""
        tokens = part_tokens(*topk_ids.shape)
        parts = (hidden_states[:tokens], topk_weights[:tokens], topk_ids[:tokens])
        topk, out = topk_ids.shape[1], torch.empty_like(parts[0])
        size = self.workspace_bytes(tokens, topk)
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
        plan = self.kernel_weights.plan(tokens, topk, tiling=None, workspace=workspace)
        plan(*parts, out)
        return plan.stages(*parts, out)
