"""What `moequant bench experts` can time.

NAME of a backend   FusedExperts with it
grouped_mm          torch's grouped GEMM over the experts in BF16: what a user has without
quantizing
vllm                vLLM's Triton experts, if vLLM is installed; fp8_block only
humming             Humming's experts, if humming-kernels is installed; see humming.py
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moequant.act_fn import SILU, SWIGLUOAI
from moequant.benchmarks.humming import humming
from moequant.errors import ArgumentError, UnsupportedError, unknown_name
from moequant.formats import dequantize, get_format
from moequant.runtime import FusedExperts
from moequant.runtime.backends import backends
from moequant.runtime.backends.stacked import STACKED
from moequant.runtime.packing import scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.formats import QuantizedWeight
    from moequant.runtime import ExpertWeights
    from moequant.runtime.activations import ActivationsChoice

    Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def contender_names() -> list[str]:
    """Every name that `make_contender` accepts."""
    return [*backends(), *_OTHERS]


def check_known(names: Iterable[str]) -> None:
    """Check names before anything is timed; raises ArgumentError for an unknown one."""
    for name in names:
        if name not in contender_names():
            raise ArgumentError(unknown_name("contender", name, contender_names()))


def takes_absent_ids(name: str) -> bool:
    """Whether the contender `name` takes ids of -1, as every backend does."""
    return name not in _OTHERS or name == "humming"


def make_contender(
    name: str,
    weights: ExpertWeights,
    *,
    activations: ActivationsChoice = "format",
) -> Experts:
    """The contender `name`, called as experts(hidden, topk_weights, ids).

    Args:
        name: one of `contender_names`.
        weights: the experts.
        activations: see `FusedExperts`. grouped_mm never quantizes them.

    Raises:
        ArgumentError: an unknown name.
        UnsupportedError: it does not run these experts here, or a CUDA graph
            cannot capture it.
    """
    check_known([name])
    if name in _OTHERS:
        scheme = scheme_of(weights.format, activations, static=False)
        return _OTHERS[name](weights, scheme)
    return capturable(FusedExperts(weights, backend=name, activations=activations))


def capturable(experts: FusedExperts) -> FusedExperts:
    """`experts`, if a CUDA graph can capture their calls.

    Raises:
        UnsupportedError: their backend synchronizes with the device.
    """
    packed = experts.packed()
    if packed.waits_for_device:
        raise UnsupportedError(
            f"backend {packed.backend.name!r} waits for the device, which no CUDA graph captures: "
            "it is not timed"
        )
    return experts


def _grouped_mm(weights: ExpertWeights, scheme: str) -> Experts:
    gate, up, down, act_fn = weights.gate, weights.up, weights.down, weights.act_fn
    if gate is None or act_fn not in (SILU, SWIGLUOAI):
        raise UnsupportedError(f"grouped_mm is timed only with gated {SILU} or {SWIGLUOAI}")
    biases = [bias for bias in (weights.gate_bias, weights.up_bias) if bias is not None]
    if len(biases) == 1:
        raise UnsupportedError("grouped_mm is timed with biases of gate and up, or of neither")
    E = weights.experts
    w13 = torch.stack([torch.cat([_bf16(gate[e]), _bf16(up[e])]) for e in range(E)]).mT
    w2 = torch.stack([_bf16(down[e]) for e in range(E)]).mT
    bias13 = torch.cat(biases, 1).bfloat16() if biases else None
    bias2 = None if weights.down_bias is None else weights.down_bias.bfloat16()

    def run(hidden: Tensor, topk_weights: Tensor, ids: Tensor) -> Tensor:
        M, T = ids.shape
        pair = ids.flatten().argsort(stable=True)
        expert = ids.flatten()[pair]
        counts = torch.zeros(E, dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, expert.long(), torch.ones_like(expert))
        offsets = counts.cumsum(0, dtype=torch.int32)
        rows = torch._grouped_mm(hidden[pair // T], w13, offs=offsets)
        if bias13 is not None:
            rows += bias13[expert]
        rows = torch._grouped_mm(_activate(act_fn, *rows.chunk(2, -1)), w2, offs=offsets)
        if bias2 is not None:
            rows += bias2[expert]
        weighted = rows * topk_weights.flatten()[pair, None].to(rows.dtype)
        by_pair = torch.empty_like(weighted)
        by_pair[pair] = weighted
        return by_pair.reshape(M, T, -1).sum(1)

    return run


def _activate(act_fn: ActFn, gate: Tensor, up: Tensor) -> Tensor:
    """The activation function as transformers writes it, not as our exact reference does."""
    if act_fn == SILU:
        return functional.silu(gate) * up
    limit = act_fn.limit
    assert limit is not None
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * act_fn.alpha))


def _bf16(weight: QuantizedWeight) -> Tensor:
    return dequantize(weight).bfloat16()


def _vllm(weights: ExpertWeights, scheme: str) -> Experts:
    if get_format(weights.format).block != (128, 128) or scheme != "fp8_group128":
        raise UnsupportedError(
            "vllm is timed with weights in blocks of 128 x 128 and activations in fp8_group128, "
            f"not with {weights.format} and {scheme}"
        )
    if weights.gate is None or weights.act_fn != SILU or weights.biases():
        raise UnsupportedError("vllm is timed with gated SiLU and no biases")
    if find_spec("vllm") is None:
        raise UnsupportedError("vllm is not installed")
    from vllm.model_executor.layers.fused_moe import (
        fused_experts,
    )
    from vllm.model_executor.layers.fused_moe.config import (
        fp8_w8a8_moe_quant_config,
    )

    w = STACKED.pack(weights)
    config = fp8_w8a8_moe_quant_config(
        w1_scale=w["w13_scale"], w2_scale=w["w2_scale"], block_shape=[128, 128]
    )

    def run(hidden: Tensor, topk_weights: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = fused_experts(
            hidden, w["w13_qdata"], w["w2_qdata"], topk_weights, ids, quant_config=config
        )
        return result

    return run


_OTHERS: dict[str, Callable[[ExpertWeights, str], Experts]] = {
    "grouped_mm": _grouped_mm,
    "vllm": _vllm,
    "humming": humming,
}
