"""Small layers of experts, calls of them, and their evaluation in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from moequant.formats import CONVERTIBLE, dequantize, get_format
from moequant.runtime import ExpertWeights
from moequant.verification.reference import evaluate_layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Experts, the BF16 weights they were made from, and a call of them."""

    weights: ExpertWeights
    source: dict[str, Tensor]
    hidden: Tensor
    ids: Tensor
    topk_weights: Tensor

    @property
    def call(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.topk_weights, self.ids

    def evaluate(
        self,
        hidden: Tensor | None = None,
        ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Output and bound, float64, for a result in `dtype`, with what `dequantize` makes of the
        weights.
        """
        decoded = {name: dequantize(q).double() for name, q in self.weights.projections().items()}
        output, bound = evaluate_layer(
            self.hidden if hidden is None else hidden,
            self.ids if ids is None else ids,
            self.topk_weights if topk_weights is None else topk_weights,
            lambda projection, e: decoded[projection][e],
        )
        if dtype != torch.float32:  # which the sum is already in
            info = torch.finfo(dtype)
            bound += info.eps / 2 * (output.abs() + bound).clamp(min=info.tiny)
        return output, bound


class Layers:
    """Makes layers; the same arguments make the same layer."""

    def make(
        self,
        format: str = "fp8_block",
        *,
        E: int = 6,
        H: int = 256,
        I: int = 128,
        M: int = 13,
        T: int = 3,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Layer:
        g = torch.Generator().manual_seed(seed)
        shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
        source = {
            name: (torch.randn(shape, generator=g) * shape[2] ** -0.5).bfloat16()
            for name, shape in shapes.items()
        }
        fmt = get_format(format)
        gate, up = fmt.quantize_fused([source["gate"], source["up"]], names=["gate", "up"])
        scores = torch.rand(M, E, generator=g)
        topk_weights, ids = scores.topk(T)
        return Layer(
            weights=ExpertWeights(gate=gate, up=up, down=fmt.quantize(source["down"])),
            source=source,
            hidden=torch.randn(M, H, generator=g).to(dtype),
            ids=ids,
            topk_weights=topk_weights / topk_weights.sum(1, keepdim=True),
        )


@pytest.fixture(params=list(CONVERTIBLE))
def every_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def layers() -> Layers:
    return Layers()


@pytest.fixture(scope="session")
def inputs() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """inputs((E, H, I, T), M): a call on the GPU; equal arguments give the same."""
    return _inputs


def _inputs(
    shape: tuple[int, int, int, int],
    M: int,
    kind: str = "uniform",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    E, H, _, T = shape
    g = torch.Generator("cuda").manual_seed(M)
    hidden = torch.randn(M, H, generator=g, device="cuda").to(dtype)
    score = torch.rand(M, E, generator=g, device="cuda")
    if kind == "skewed":  # the first experts take most tokens
        score = score * torch.arange(E, 0, -1, device="cuda") ** 2
    ids = score.topk(T).indices
    if kind == "holes":
        ids[torch.rand(M, T, generator=g, device="cuda") < 0.4] = -1
    if kind == "one expert":
        ids[:] = -1
        ids[:, T - 1] = E - 1
    if kind == "nowhere":
        ids[:] = -1
    router = torch.rand(M, T, generator=g, device="cuda") + 0.1
    return hidden, router / router.sum(1, keepdim=True), ids.int()
