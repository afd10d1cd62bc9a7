"""What `moequant bench experts` can time: every backend, and what other packages offer.

NAME of a backend    FusedExperts with it
grouped_mm           torch's grouped BF16 GEMM over the dequantized experts: what a user has
without quantizing
vllm                 vLLM's Triton experts, if vLLM is installed; fp8_block alone
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moequant.errors import UnsupportedError
from moequant.formats import dequantize
from moequant.layouts.gate_up import stack_gate_up
from moequant.runtime import FusedExperts
from moequant.runtime.backends import backends

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.runtime import ExpertWeights

    Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def contender_names() -> list[str]:
    """Every name `make_contender` knows."""
    return [*backends(), *_OTHERS]


def make_contender(name: str, weights: ExpertWeights) -> Experts:
    """`experts(hidden, ids, topk_weights)` by `name`.

    Raises:
        UnsupportedError: nothing is called that, or it does not run these experts here; says why.
    """
    if name in _OTHERS:
        return _OTHERS[name](weights)
    if name not in backends():
        raise UnsupportedError(
            f"there is nothing called {name!r} to time; there are {', '.join(contender_names())}"
        )
    return FusedExperts(weights, backend=name)


def _grouped_mm(weights: ExpertWeights) -> Experts:
    if weights.device.type != "cuda":
        raise UnsupportedError("grouped_mm wants a CUDA device")
    assert weights.gate is not None
    w13 = torch.stack(
        [
            torch.cat([dequantize(weights.gate[e]), dequantize(weights.up[e])]).bfloat16()
            for e in range(weights.experts)
        ]
    )
    w2 = torch.stack([dequantize(weights.down[e]).bfloat16() for e in range(weights.experts)])
    return partial(_run_grouped_mm, w13.mT, w2.mT)


def _run_grouped_mm(
    w13: Tensor, w2: Tensor, hidden: Tensor, ids: Tensor, topk_weights: Tensor
) -> Tensor:
    M, T = ids.shape
    slot = ids.flatten().argsort(stable=True)
    counts = torch.zeros(w13.shape[0], dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, ids.flatten().long(), torch.ones_like(ids.flatten()))
    offsets = counts.cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(hidden[slot // T], w13, offs=offsets).chunk(2, -1)
    rows = torch._grouped_mm(functional.silu(gate) * up, w2, offs=offsets)
    weighted = rows * topk_weights.flatten()[slot, None].to(rows.dtype)
    by_slot = torch.empty_like(weighted)
    by_slot[slot] = weighted
    return by_slot.reshape(M, T, -1).sum(1)


def _vllm(weights: ExpertWeights) -> Experts:
    if weights.format != "fp8_block":
        raise UnsupportedError(f"vllm is timed with fp8_block, not {weights.format}")
    if find_spec("vllm") is None:
        raise UnsupportedError("vllm is not installed")
    from vllm.model_executor.layers.fused_moe import (  # type: ignore[import-not-found]
        fused_experts,
    )
    from vllm.model_executor.layers.fused_moe.config import (  # type: ignore[import-not-found]
        fp8_w8a8_moe_quant_config,
    )

    assert weights.gate is not None
    w13 = stack_gate_up(weights.gate, weights.up)
    down = weights.down
    config = fp8_w8a8_moe_quant_config(
        w1_scale=w13.scale, w2_scale=down.scale, block_shape=[128, 128]
    )

    def run(hidden: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        result: Tensor = fused_experts(
            hidden, w13.qdata, down.qdata, topk_weights, ids, quant_config=config
        )
        return result

    return run


_OTHERS: dict[str, Callable[[ExpertWeights], Experts]] = {"grouped_mm": _grouped_mm, "vllm": _vllm}
