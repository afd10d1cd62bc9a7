"""Decode and multiply in float32: every format, any device. Other backends are judged by it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, pad

from moequant.formats import dequantize
from moequant.runtime.activations import GROUPS, NVFP4_STATIC, SCHEMES, quantize_activations
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.routed import StandardExperts
from moequant.runtime.capture import capturing

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.runtime.activations import Activations
    from moequant.runtime.routing import Permutation
    from moequant.runtime.weights import ExpertWeights
    from moequant.runtime.workload import Workload

ROW_MULTIPLE = 16
"""Each GEMM has a multiple of this many rows.

BLAS libraries sum few rows in another order: MKL 2024.2 does below 4 rows a thread. Padded to a
multiple of 8 or more, a token's result was measured not to depend on the others in the call, with 1
to 24 threads, on AVX2 and AVX-512. No library promises it. 16 rows cost a tenth of decoding the
weights they meet.
"""


class ReferenceExperts(StandardExperts):
    """See `TorchReference`."""

    def run_sorted(self, activations: Activations, permutation: Permutation) -> Tensor:
        """See `StandardExperts.run_sorted`."""
        weights, scheme = self.weights(), self.workload.activations
        token = permutation.token
        size = (token.shape[0], weights.hidden)
        rows = torch.zeros(size, dtype=torch.float32, device=token.device)
        if capturing(token.device):
            begin, end = permutation.offsets[:-1], permutation.offsets[1:]
            row = torch.arange(token.shape[0], device=token.device)[:, None]
            for e in range(weights.experts):
                y = run_expert(activations, weights, e, scheme)[token]
                rows = torch.where((row >= begin[e]) & (row < end[e]), y, rows)
            return rows
        offsets = permutation.offsets.tolist()
        for e, (begin, end) in enumerate(pairwise(offsets)):
            if begin < end:
                x = activations.take(token[begin:end])
                rows[begin:end] = run_expert(x, weights, e, scheme)
        return rows


class TorchReference(Backend):
    """Float32 throughout: dequantized weights, products, activations, and the sums of both GEMMs.

    Weights are dequantized one matrix at a time, each at most once a call. Runs of one call are
    bitwise equal. torch.set_float32_matmul_precision other than "highest" lowers the precision here
    too.

    The rows of an expert are read on the host, but within the capture of a CUDA graph, where every
    expert computes all tokens.
    """

    name = "torch_reference"
    default_on = ("cpu",)
    experts = ReferenceExperts

    def supports(self, workload: Workload) -> str | None:
        """See `why_not_reference`; and sizes that are no multiple of a scheme's groups."""
        group = GROUPS.get(workload.activations, 1)
        if workload.hidden % group or workload.intermediate % group:
            return f"quantizes activations to {workload.activations} for H and I in {group}s only"
        return why_not_reference(workload)


def why_not_reference(workload: Workload) -> str | None:
    """Activations that nothing here can quantize, a device without numbers, and nothing else."""
    if workload.activations not in SCHEMES:
        return f"cannot quantize activations to {workload.activations}"
    if workload.device.type == "meta":
        return "needs a device that holds numbers"
    return None


def run_expert(x: Activations, weights: ExpertWeights, e: int, scheme: str) -> Tensor:
    """Expert `e` on its rows: [R, H] float32.

    Args:
        x: R rows in `scheme`, or not quantized for "nvfp4_static", whose scale is the expert's.
        weights: the experts.
        e: which.
        scheme: how the values between the GEMMs are quantized.
    """
    R = x.qdata.shape[0]
    if scheme == NVFP4_STATIC:
        static = weights.static_scale("gate_up", e)
        x = quantize_activations(x.qdata, scheme, static_scale=static)
    padded = pad(x.dequantize(), (0, 0, 0, -R % ROW_MULTIPLE))
    gate = None
    if weights.gate is not None:
        gate = _linear(padded, weights.gate[e], weights.gate_bias, e)
    h = weights.act_fn(gate, _linear(padded, weights.up[e], weights.up_bias, e))
    static = weights.static_scale("down", e if scheme == NVFP4_STATIC else None)
    h = quantize_activations(h, scheme, static_scale=static).dequantize()
    return _linear(h, weights.down[e], weights.down_bias, e)[:R]


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, e: int) -> Tensor:
    y = linear(x, dequantize(weight))
    return y if bias is None else y + bias[e].float()
