"""What `moequant bench experts` can time: every backend, and what other packages offer.

NAME of a backend    FusedExperts with it
grouped_mm           torch's grouped BF16 GEMM over the dequantized experts: what a user has
without quantizing
vllm                 vLLM's Triton experts, if vLLM is installed; fp8_block alone
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moequant.act_fn import SILU, SWIGLUOAI
from moequant.errors import UnsupportedError
from moequant.formats import dequantize
from moequant.runtime import FusedExperts
from moequant.runtime.backends import backends
from moequant.runtime.backends.stacked import STACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from moequant.act_fn import ActFn
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
    """`experts(hidden, topk_weights, ids)` by `name`.

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
        UnsupportedError: their backend waits for the device.
    """
    packed = experts.packed()
    if not packed.capturable:
        raise UnsupportedError(
            f"backend {packed.backend.name!r} waits for the device, which no CUDA graph captures: "
            "it is not timed"
        )
    return experts


@dataclass(frozen=True, kw_only=True)
class _GroupedMm:
    """Torch's grouped GEMM in BF16, every operation one of torch's.

    Attributes:
        w13: [E, H, 2 * I], gate beside up.
        w2: [E, I, H].
        bias13: [E, 2 * I], or None.
        bias2: [E, H], or None.
        act_fn: SILU or SWIGLUOAI.
    """

    w13: Tensor
    w2: Tensor
    bias13: Tensor | None
    bias2: Tensor | None
    act_fn: ActFn

    def __call__(self, hidden: Tensor, topk_weights: Tensor, ids: Tensor) -> Tensor:
        M, T = ids.shape
        slot = ids.flatten().argsort(stable=True)
        expert = ids.flatten()[slot]
        counts = torch.zeros(self.w13.shape[0], dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, expert.long(), torch.ones_like(expert))
        offsets = counts.cumsum(0, dtype=torch.int32)
        rows = torch._grouped_mm(hidden[slot // T], self.w13, offs=offsets)
        if self.bias13 is not None:
            rows += self.bias13[expert]
        rows = torch._grouped_mm(self._act(*rows.chunk(2, -1)), self.w2, offs=offsets)
        if self.bias2 is not None:
            rows += self.bias2[expert]
        weighted = rows * topk_weights.flatten()[slot, None].to(rows.dtype)
        by_slot = torch.empty_like(weighted)
        by_slot[slot] = weighted
        return by_slot.reshape(M, T, -1).sum(1)

    def _act(self, gate: Tensor, up: Tensor) -> Tensor:
        """As transformers writes it for these models, not as our reference does for exactness."""
        if self.act_fn == SILU:
            return functional.silu(gate) * up
        limit = SWIGLUOAI.limit
        assert limit is not None
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * SWIGLUOAI.alpha))


def _grouped_mm(weights: ExpertWeights) -> Experts:
    gate, up, down = weights.gate, weights.up, weights.down
    if gate is None or weights.act_fn not in (SILU, SWIGLUOAI):
        raise UnsupportedError(f"grouped_mm is timed with gated {SILU} or {SWIGLUOAI} alone")
    biases = [weights.gate_bias, weights.up_bias]
    known = [bias for bias in biases if bias is not None]
    if len(known) == 1:
        raise UnsupportedError("grouped_mm is timed with biases of gate and up, or of neither")
    each = range(weights.experts)
    return _GroupedMm(
        w13=torch.stack([torch.cat([_bf16(gate[e]), _bf16(up[e])]) for e in each]).mT,
        w2=torch.stack([_bf16(down[e]) for e in each]).mT,
        bias13=torch.cat(known, 1).bfloat16() if known else None,
        bias2=None if weights.down_bias is None else weights.down_bias.bfloat16(),
        act_fn=weights.act_fn,
    )


def _bf16(weight: QuantizedWeight) -> Tensor:
    return dequantize(weight).bfloat16()


def _vllm(weights: ExpertWeights) -> Experts:
    if weights.format != "fp8_block":
        raise UnsupportedError(f"vllm is timed with fp8_block, not {weights.format}")
    if weights.gate is None or weights.act_fn != SILU or weights.biases():
        raise UnsupportedError("vllm is timed with gated SiLU and no biases")
    if find_spec("vllm") is None:
        raise UnsupportedError("vllm is not installed")
    from vllm.model_executor.layers.fused_moe import (  # type: ignore[import-not-found]
        fused_experts,
    )
    from vllm.model_executor.layers.fused_moe.config import (  # type: ignore[import-not-found]
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


_OTHERS: dict[str, Callable[[ExpertWeights], Experts]] = {"grouped_mm": _grouped_mm, "vllm": _vllm}
