"""Decode and multiply in float32: every format, any device. Other backends are judged by it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, pad

from moequant.formats import dequantize
from moequant.runtime.activations import (
    FP8_TENSOR,
    GROUPS,
    NVFP4_STATIC,
    SCHEMES,
    quantize_activations,
)
from moequant.runtime.backends.base import Backend
from moequant.runtime.backends.routed import StandardExperts
from moequant.runtime.capture import capturing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.runtime.activations import Activations
    from moequant.runtime.routing import Permutation
    from moequant.runtime.weights import ExpertWeights
    from moequant.runtime.workload import Workload

GEMM_ROWS = 16
"""Each GEMM has a multiple of this many rows.

BLAS libraries sum few rows in another order: MKL 2024.2 does below 4 rows a thread. Padded to a
multiple of 8 or more, a token's result was measured not to depend on the others in the call, with 1
to 24 threads, on AVX2 and AVX-512. No library promises it. 16 rows cost a tenth of decoding the
weights they meet.
"""


class ReferenceExperts(StandardExperts):
    """See `TorchReference`."""

    compiles = False

    def run_sorted(self, activations: Activations, permutation: Permutation) -> Tensor:
        """See `StandardExperts.run_sorted`."""
        weights, scheme = self.weights(), self.workload.activations
        token = permutation.token
        if scheme == FP8_TENSOR:
            h = self._each_expert(
                permutation,
                weights.intermediate,
                lambda e, rows: activate(activations.take(token[rows]), weights, e, scheme),
            )
            # Rows of no expert are 0, which makes no scale larger.
            h = quantize_activations(h, scheme).dequantize()
            return self._each_expert(
                permutation, weights.hidden, lambda e, rows: project(h[rows], weights, e)
            )
        if capturing(token.device):
            # All tokens once, which are fewer than their rows.
            return self._each_expert(
                permutation,
                weights.hidden,
                lambda e, rows: run_expert(activations, weights, e, scheme)[token],
            )
        return self._each_expert(
            permutation,
            weights.hidden,
            lambda e, rows: run_expert(activations.take(token[rows]), weights, e, scheme),
        )

    def _each_expert(
        self, permutation: Permutation, columns: int, compute: Callable[[int, slice], Tensor]
    ) -> Tensor:
        """What `compute` makes of each expert's rows: [M * T, columns] float32, 0 in the others.

        Within a capture, each expert is given all rows, and its own are taken of the result.
        """
        token, offsets = permutation.token, permutation.offsets
        size = (token.shape[0], columns)
        result = torch.zeros(size, dtype=torch.float32, device=token.device)
        if capturing(token.device):
            row = torch.arange(token.shape[0], device=token.device)[:, None]
            for e in range(self.workload.experts):
                here = (row >= offsets[e]) & (row < offsets[e + 1])
                result = torch.where(here, compute(e, slice(None)), result)
            return result
        for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
            if begin < end:
                result[begin:end] = compute(e, slice(begin, end))
        return result


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
        group, _ = self.multiples_with(workload.activations)
        if workload.hidden % group or workload.intermediate % group:
            return (
                f"needs H and I in multiples of {group} for activations in {workload.activations}"
            )
        return why_not_reference(workload)

    def multiples_with(self, activations: str) -> tuple[int, int]:
        """The columns of the scheme's groups."""
        group = GROUPS.get(activations, 1)
        return group, group


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
        scheme: how the values between the GEMMs are quantized, row by row.
    """
    h = activate(x, weights, e, scheme)
    static = weights.static_scale("down", e if scheme == NVFP4_STATIC else None)
    h = quantize_activations(h, scheme, static_scale=static).dequantize()
    return project(h, weights, e)


def activate(x: Activations, weights: ExpertWeights, e: int, scheme: str) -> Tensor:
    """act_fn(gate(x), up(x)) of expert `e`, not quantized: [R, I] float32; see `run_expert`."""
    if scheme == NVFP4_STATIC:
        static = weights.static_scale("gate_up", e)
        x = quantize_activations(x.qdata, scheme, static_scale=static)
    rows = _padded(x.dequantize())
    gate = None
    if weights.gate is not None:
        gate = _linear(rows, weights.gate[e], weights.gate_bias, e)
    h = weights.act_fn(gate, _linear(rows, weights.up[e], weights.up_bias, e))
    return h[: x.qdata.shape[0]]


def project(h: Tensor, weights: ExpertWeights, e: int) -> Tensor:
    """down(h) of expert `e` for [R, I] float32: [R, H] float32."""
    return _linear(_padded(h), weights.down[e], weights.down_bias, e)[: h.shape[0]]


def _padded(x: Tensor) -> Tensor:
    """See GEMM_ROWS."""
    return pad(x, (0, 0, 0, -x.shape[0] % GEMM_ROWS))


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, e: int) -> Tensor:
    y = linear(x, dequantize(weight))
    return y if bias is None else y + bias[e].float()
