"""Every format on any CUDA device from SM80 on: the kernels of moequant.kernels.portable."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from moequant.formats import RUNNABLE, get_format
from moequant.formats.base import WHOLE
from moequant.kernels.portable.weights import ELEMENTS, Experts, Projection
from moequant.runtime.activations import FP8_SCHEMES, FP8_TENSOR
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.capability import why_no_triton, why_not_capable
from moequant.runtime.backends.planned import PlannedExperts
from moequant.runtime.backends.routed import BatchedExperts

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from torch import Tensor

    from moequant.formats import Format, QuantizedWeight
    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.portable.portable_fused import PortablePlan
    from moequant.runtime.batched import BatchedTokens
    from moequant.runtime.weights import ExpertWeights
    from moequant.runtime.workload import Workload

_CAPABILITY = (8, 0)  # of BF16 tensor cores
_ACTIVATIONS = (*FP8_SCHEMES, "none")
_SCALE_COLUMNS = {
    torch.float32: (128, WHOLE),
    torch.bfloat16: (128,),
    torch.float8_e8m0fnu: (32,),
    torch.float8_e4m3fn: (16,),
}
"""How many columns may share a scale, by its dtype: what the kernels decode."""


def is_decoded(format: Format) -> bool:
    """Whether the kernels decode a format."""
    columns = _SCALE_COLUMNS.get(format.scale_dtype, ())
    return format.element.name in ELEMENTS and format.block[1] in columns


DECODED = [name for name, format in RUNNABLE.items() if is_decoded(format)]


class TritonExperts(PlannedExperts):
    """See `TritonPortable`."""

    def __init__(
        self, backend: Backend, tensors: Mapping[str, Tensor], *, workload: Workload
    ) -> None:
        super().__init__(backend, tensors, workload=workload)
        self.kernel_weights = portable_experts(self.weights(), workload.activations)

    def kernels_for(self, tokens: int, topk: int) -> Hashable:
        """See `PackedExperts.kernels_for`."""
        from moequant.kernels.portable.portable_fused import kernels_for

        return kernels_for(self.kernel_weights, tokens, topk)

    def plan(
        self, tokens: int, topk: int, arena: WorkspaceArena, dtype: torch.dtype
    ) -> PortablePlan:
        """See `PlannedExperts.plan`."""
        from moequant.kernels.portable.portable_fused import PortablePlan

        return PortablePlan(self.kernel_weights, tokens, topk, arena, dtype)


class TritonPortable(Backend):
    """Weights dequantized in registers, products exact in BF16, sums in float32.

    So it differs from the reference by the order of sums, and by what lies between the GEMMs: where
    that is not quantized, it is rounded to bfloat16 for bfloat16 hidden states, as is an expert's
    result, and is float32 for others. Hidden states that are not quantized are multiplied as they
    are: float16 in two passes of the tensor cores, float32 in three. Runs of one call are bitwise
    equal. Nothing is read on the host: an id that is out of range contributes nothing, like -1, and
    raises no error.
    """

    name = "triton"
    default_on = ("cuda",)
    experts = TritonExperts

    def supports(self, workload: Workload) -> str | None:
        """Needs a CUDA device of SM80 or newer, and triton."""
        return why_not_portable(workload)

    def serves(self, target: str, activations: str) -> Collection[str]:
        """See `Backend.serves`."""
        return DECODED if activations in _ACTIVATIONS else ()


class TritonBatchedExperts(BatchedExperts):
    """See `TritonBatched`."""

    def __init__(
        self, backend: Backend, tensors: Mapping[str, Tensor], *, workload: Workload
    ) -> None:
        super().__init__(backend, tensors, workload=workload)
        self._experts = portable_experts(self.weights(), workload.activations)

    def _run_batches(self, tokens: BatchedTokens) -> Tensor:
        from moequant.kernels.portable.portable_fused import batched_experts

        codes = tokens.qdata if tokens.scale is None else tokens.qdata.view(torch.uint8)
        scale = None if tokens.scale is None else tokens.scale.contiguous()
        return batched_experts(self._experts, codes.contiguous(), scale, tokens.counts)


class TritonBatched(Backend):
    """The kernels of `triton` on the batches of an expert-parallel dispatch.

    Results are bfloat16, or float32 for float16 and float32 tokens that are not quantized. Nothing
    is read on the host.
    """

    name = "triton_batched"
    experts = TritonBatchedExperts

    def supports(self, workload: Workload) -> str | None:
        """Needs a CUDA device of SM80 or newer, and triton."""
        return why_not_portable(workload)


def why_not_portable(workload: Workload) -> str | None:
    """Why the kernels do not run `workload`; None where they do."""
    if workload.format not in DECODED:
        return f"cannot decode {workload.format}"
    if workload.activations not in _ACTIVATIONS:
        return f"cannot quantize activations to {workload.activations}"
    if workload.experts == 0:
        return "needs at least one expert"
    if workload.device.type != "cuda":
        return "needs a CUDA device"
    return _why_not_on(workload.device)


def portable_experts(weights: ExpertWeights, activations: str) -> Experts:
    """The weights as `moequant.kernels.portable` takes them: views."""
    static, tensor_scale = activations == "fp8_static", activations == FP8_TENSOR
    return Experts(
        gate=None if weights.gate is None else _projection(weights.gate, weights.gate_bias),
        up=_projection(weights.up, weights.up_bias),
        down=_projection(weights.down, weights.down_bias),
        act_fn=weights.act_fn,
        # What differs is the quantization alone.
        activations="fp8_token" if static or tensor_scale else activations,
        up_static=weights.static_scale("gate_up") if static else None,
        down_static=weights.static_scale("down") if static else None,
        tensor_scale=tensor_scale,
    )


def _projection(q: QuantizedWeight, bias: Tensor | None) -> Projection:
    format = get_format(q.format)
    rows, columns = format.block
    of_rows = columns == WHOLE
    return Projection(
        element=format.element.name,
        qdata=q.qdata.view(torch.uint8) if format.element.bits <= 8 else q.qdata,
        scale=q.scale.view(torch.uint8) if q.scale.itemsize == 1 else q.scale,
        scale_rows=1 if of_rows else rows,
        scale_columns=0 if of_rows else columns,
        # The scale of a row, of which there are N, or of the matrix.
        end=q.scale.float().reshape(q.qdata.shape[: 2 if rows == 1 else 1])
        if of_rows
        else q.global_scale,
        bias=bias,
    )


@cache
def _why_not_on(device: torch.device) -> str | None:
    reason = why_not_capable(device, "8.0 or more", lambda capability: capability >= _CAPABILITY)
    return reason or why_no_triton()
