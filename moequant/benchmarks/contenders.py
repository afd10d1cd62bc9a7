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
from moequant.runtime.act_fn import SILU
from moequant.runtime.backends import FusedBackend, backends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.runtime import ExpertWeights

    Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def contender_names() -> list[str]:
    """Every name `make_contender` knows."""
    return [*backends(), *_OTHERS]


def check_known(names: Iterable[str]) -> None:
    """Ask, before anything is timed, whether all of these can be made.

    Raises:
        UnsupportedError: nothing has one of the names.
    """
    for name in names:
        if name not in contender_names():
            known = ", ".join(contender_names())
            raise UnsupportedError(f"there is nothing called {name!r} to time; there are {known}")


def make_contender(name: str, weights: ExpertWeights) -> Experts:
    """`experts(hidden, ids, topk_weights)` by `name`.

    Raises:
        UnsupportedError: nothing is called that, or it does not run these experts here, or not
            within a CUDA graph; says why.
    """
    check_known([name])
    if name in _OTHERS:
        return _OTHERS[name](weights)
    return capturable(FusedExperts(weights, backend=name))


def capturable(experts: FusedExperts) -> FusedExperts:
    """`experts`, whose calls a CUDA graph can capture.

    Raises:
        UnsupportedError: their backend is not fused, and so waits for the device.
    """
    name = experts.chosen_backend()
    if not isinstance(backends()[name], FusedBackend):
        raise UnsupportedError(
            f"backend {name!r} waits for the device, which no CUDA graph captures: it is not timed"
        )
    return experts


def _grouped_mm(weights: ExpertWeights) -> Experts:
    if weights.device.type != "cuda":
        raise UnsupportedError("grouped_mm wants a CUDA device")
    gate, up = _plain(weights, "grouped_mm")
    w13 = torch.stack(
        [
            torch.cat([dequantize(gate[e]), dequantize(up[e])]).bfloat16()
            for e in range(weights.experts)
        ]
    )
    w2 = torch.stack([dequantize(weights.down[e]).bfloat16() for e in range(weights.experts)])
    return partial(_run_grouped_mm, w13.mT, w2.mT)


def _plain(weights: ExpertWeights, name: str) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Gate and up of experts that compute gated SiLU without biases."""
    if weights.gate is None or weights.act_fn != SILU or weights.biases():
        raise UnsupportedError(f"{name} is timed with gated SiLU and no biases")
    return weights.gate, weights.up


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

    w13 = stack_gate_up(*_plain(weights, "vllm"))
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
