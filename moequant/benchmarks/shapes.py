"""Sizes of the MoE layers that are timed, by the name of a model that has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from moequant.act_fn import SILU, SWIGLUOAI, ActFn
from moequant.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A MoE layer: E experts, H, I, the T experts of a token, and what its experts compute."""

    experts: int
    hidden: int
    intermediate: int
    topk: int
    act_fn: ActFn = SILU
    biased: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """E, H, I, T."""
        return self.experts, self.hidden, self.intermediate, self.topk

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes))


def _shape(
    experts: int, hidden: int, intermediate: int, topk: int, act_fn: ActFn = SILU
) -> LayerShape:
    return LayerShape(
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        topk=topk,
        act_fn=act_fn,
        biased=act_fn is SWIGLUOAI,
    )


SHAPES = {
    "qwen3-30b": _shape(128, 2048, 768, 8),
    "qwen3-235b": _shape(128, 4096, 1536, 8),
    "deepseek-v3": _shape(256, 7168, 2048, 8),
    "mixtral-8x7b": _shape(8, 4096, 14336, 2),
    "gpt-oss-120b": _shape(128, 2880, 2880, 4, SWIGLUOAI),
}
"""From the config.json of each release. ExHxIxT has the sizes of one and plain gated SiLU: so
128x2880x2880x4 is gpt-oss-120b without its function and its biases."""


def parse_shapes(text: str) -> dict[str, LayerShape]:
    """Shapes by what they are called, separated by commas; `all` stands for every one of SHAPES.

    Raises:
        UnsupportedError: see `parse_shape`.
    """
    names = chain.from_iterable(SHAPES if name == "all" else [name] for name in text.split(","))
    return {name: parse_shape(name) for name in names}


def parse_shape(text: str) -> LayerShape:
    """A shape by its name, or written as ExHxIxT: gated SiLU without biases.

    Raises:
        UnsupportedError: it is neither, or T is more than E.
    """
    if text in SHAPES:
        return SHAPES[text]
    match = re.fullmatch("x".join([r"([1-9]\d{0,11})"] * 4), text)
    if match is None:
        raise UnsupportedError(
            f"there is no shape {text!r}; use {', '.join(SHAPES)}, all, or sizes such as "
            "128x2048x768x8 (experts x hidden x intermediate x experts a token)"
        )
    experts, hidden, intermediate, topk = map(int, match.groups())
    shape = _shape(experts, hidden, intermediate, topk)
    if shape.topk > shape.experts:
        raise UnsupportedError(
            f"shape {text}: {shape.topk} experts a token of {shape.experts}; at most all"
        )
    return shape
