"""Small layers of random experts, and calls of them: what a self-test runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moequant.act_fn import SILU, SWIGLUOAI, ActFn
from moequant.formats import get_format
from moequant.formats.elements import E2M1_MAX, E4M3_MAX
from moequant.runtime import ExpertWeights
from moequant.runtime.activations import NVFP4_STATIC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a layer: E experts, hidden H, intermediate I, T experts per token."""

    experts: int
    hidden: int
    intermediate: int
    topk: int


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kind of layer.

    Attributes:
        name: what reports call it.
        sizes: the layer has the first of these that its format and backend run.
        act_fn: its activation function.
        biased: whether every projection has a bias.
        octaves: of every eight groups of 32 columns, how far one lies below the others.
    """

    name: str
    sizes: tuple[LayerSizes, ...]
    act_fn: ActFn
    biased: bool
    octaves: int = 0


EVEN = Variant(
    name="multiples of 256",
    sizes=(LayerSizes(experts=8, hidden=512, intermediate=256, topk=4),),
    act_fn=SILU,
    biased=False,
)
ODD = Variant(
    name="incomplete tiles, biases, swigluoai",
    # Odd sizes for formats without groups; then multiples of 16, of 32, and of 128 for w4a8.
    sizes=tuple(
        LayerSizes(experts=8, hidden=hidden, intermediate=intermediate, topk=2)
        for hidden, intermediate in ((717, 333), (720, 336), (736, 352), (640, 384))
    ),
    act_fn=SWIGLUOAI,
    biased=True,
)
VARIANTS = (EVEN, ODD)
FAR = Variant(
    name="scales far apart",
    sizes=EVEN.sizes,
    act_fn=SILU,
    biased=False,
    octaves=40,
)
"""Of which scales cannot be folded into codes of eight bits; for scales of eight bits alone."""
_LARGEST = {"fp8_static": E4M3_MAX, NVFP4_STATIC: E2M1_MAX * E4M3_MAX}
"""The largest multiple of a static scale, by scheme."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer, on the CPU.

    Attributes:
        name: what reports call it.
        hidden: [M, H] bfloat16, N(0, 1).
        topk_weights: [M, T] float32, positive, of sum 1.
        topk_ids: [M, T] int32.
        expert_map: [2 * E] int64, or None where ids are indices.
    """

    name: str
    hidden: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None = None

    def arguments(self, device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Positional and keyword arguments of `FusedExperts.forward`, on `device`."""
        tensors = (self.hidden, self.topk_weights, self.topk_ids)
        named = {} if self.expert_map is None else {"expert_map": self.expert_map.to(device)}
        return tuple(t.to(device) for t in tensors), named


def variants_of(format: str) -> tuple[Variant, ...]:
    """The kinds of layers that a format is tested with."""
    far = get_format(format).scale_dtype == torch.float8_e8m0fnu
    return (*VARIANTS, FAR) if far else VARIANTS


def calls_of(sizes: LayerSizes, *, many: bool) -> Iterator[Call]:
    """One call of a few tokens, and if `many` also those of each kind of routing.

    Uniform routing has T distinct experts for each token. Skewed routing sends every token to
    expert 0 and one in four of the other pairs nowhere (-1); E of its 2 * E ids are of experts on
    another rank.
    """
    E, T = sizes.experts, sizes.topk
    g = torch.Generator().manual_seed(1)

    def uniform(tokens: int) -> Tensor:
        return torch.rand(tokens, E, generator=g).topk(T, dim=1).indices.int()

    def call(name: str, ids: Tensor, expert_map: Tensor | None = None) -> Call:
        weights = torch.rand(ids.shape, generator=g) + 0.1
        return Call(
            name=name,
            hidden=torch.randn(len(ids), sizes.hidden, generator=g).bfloat16(),
            topk_weights=weights / weights.sum(1, keepdim=True),
            topk_ids=ids,
            expert_map=expert_map,
        )

    yield call("33 tokens", uniform(33))
    if many:
        yield call("no token", uniform(0))
        yield call("1 token", uniform(1))
        yield call("300 tokens", uniform(300))
        yield call("40 tokens, one expert", torch.full((40, T), E // 2, dtype=torch.int32))
        skewed = 2 * uniform(150)
        skewed[torch.rand(skewed.shape, generator=g) < 0.25] = -1
        skewed[:, 0] = 0
        here = torch.stack([torch.arange(E), torch.full((E,), -1)], dim=1).flatten()
        yield call("150 tokens, skewed, with an expert map", skewed, here)


def random_layer(
    format: str, variant: Variant, sizes: LayerSizes, *, static: bool
) -> ExpertWeights:
    """Experts on the CPU, quantized from Gaussian weights of standard deviation K**-0.5.

    Args:
        format: of the weights.
        variant: the kind of layer.
        sizes: one of the variant's.
        static: whether activations have static scales, which clip one value in a thousand.
    """
    g = torch.Generator().manual_seed(0)
    E, H, I = sizes.experts, sizes.hidden, sizes.intermediate
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    parts: dict[str, Any] = {
        name: torch.randn(shape, generator=g) * shape[2] ** -0.5 for name, shape in shapes.items()
    }
    if variant.octaves:
        for weight in parts.values():
            weight.unflatten(-1, (-1, 32))[:, :, 3::8] *= 2.0**-variant.octaves
    fmt = get_format(format)
    gate, up = fmt.quantize_fused([parts["gate"], parts["up"]], names=["gate", "up"])
    others: dict[str, Any] = {}
    if variant.biased:
        others = {
            f"{name}_bias": torch.randn(shape[:2], generator=g) * 0.1
            for name, shape in shapes.items()
        }
    if static:
        assert fmt.static_activations is not None
        largest = _LARGEST[fmt.static_activations]
        others["gate_up_input_scale"] = torch.tensor([3.3 / largest])
        others["down_input_scale"] = torch.tensor([1.5 / largest])
    down = fmt.quantize(parts["down"], name="down")
    return ExpertWeights(gate=gate, up=up, down=down, act_fn=variant.act_fn, **others)
