"""Random experts and inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.formats import get_format
from moequant.runtime import ExpertWeights

if TYPE_CHECKING:
    from moequant.benchmarks.shapes import LayerShape
    from moequant.formats import QuantizedWeight

ROUTINGS = ("uniform", "skewed", "one-expert")
"""Ways to route tokens; see `random_inputs`."""

_DISTINCT = 4
"""Experts with weights of their own; the others are copies of these, in separate memory."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call: hidden states [M, H] bfloat16, ids [M, T] int32, router weights [M, T] float32."""

    hidden: Tensor
    ids: Tensor
    topk_weights: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `FusedExperts.forward`, in order."""
        return self.hidden, self.topk_weights, self.ids


def random_experts(shape: LayerShape, format: str, device: torch.device) -> ExpertWeights:
    """Experts quantized from Gaussian BF16 weights of standard deviation K**-0.5; 0.1 for biases.

    Raises:
        UnsupportedError: the format does not support these sizes.
    """
    g = torch.Generator(device).manual_seed(0)
    E, H, I = shape.experts, shape.hidden, shape.intermediate
    fmt = get_format(format)
    made = min(E, _DISTINCT)

    def gaussian(N: int, K: int) -> Tensor:
        return torch.randn(made, N, K, generator=g, device=device).mul_(K**-0.5).bfloat16()

    def repeated(q: QuantizedWeight) -> QuantizedWeight:
        index = torch.arange(E, device=device) % made
        return q.map(lambda t: t[index], torch.Size((E, *q.shape[1:])))

    gate, up = fmt.quantize_fused([gaussian(I, H), gaussian(I, H)], names=["gate", "up"])
    down = fmt.quantize(gaussian(H, I))
    rows = {"gate_bias": I, "up_bias": I, "down_bias": H} if shape.biased else {}
    biases = {
        name: torch.randn(E, size, generator=g, device=device) * 0.1 for name, size in rows.items()
    }
    return ExpertWeights(
        gate=repeated(gate),
        up=repeated(up),
        down=repeated(down),
        act_fn=shape.act_fn,
        **biases,
    )


def random_inputs(
    shape: LayerShape,
    tokens: int,
    device: torch.device,
    seed: int,
    *,
    routing: str = "uniform",
    busiest: int = 0,
) -> Inputs:
    """Gaussian hidden states, router weights that sum to 1, and ids by `routing`.

    uniform     each token goes to T distinct experts, all sets of T equally likely
    skewed      each token goes to the T experts of largest u * (E - r)**2, with u uniform in [0, 1)
                for each token and expert, and rank r = (e - busiest) mod E of expert e
    one-expert  each token goes to expert `busiest` alone; its other ids are -1
    """
    g = torch.Generator(device).manual_seed(seed)
    E, T = shape.experts, shape.topk
    score = torch.rand(tokens, E, generator=g, device=device)
    weights = torch.rand(tokens, T, generator=g, device=device) + 0.1
    hidden = torch.randn(tokens, shape.hidden, generator=g, device=device).bfloat16()
    if routing == "skewed":
        rank = (torch.arange(E, device=device) - busiest) % E
        score = score * (E - rank) ** 2
    ids = score.topk(T, dim=1).indices.int()
    if routing == "one-expert":
        ids.fill_(-1)[:, T - 1] = busiest
    return Inputs(hidden=hidden, ids=ids, topk_weights=weights / weights.sum(1, keepdim=True))
