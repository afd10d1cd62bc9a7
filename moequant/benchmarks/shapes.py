"""Sizes of MoE layers, by the name of a model that has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from moequant.act_fn import SILU, SWIGLUOAI, ActFn
from moequant.errors import ArgumentError


@dataclass(frozen=True)
class LayerShape:
    """A MoE layer: experts E, hidden H, intermediate I, experts per token T, and their function."""

    experts: int
    hidden: int
    intermediate: int
    topk: int
    act_fn: ActFn = SILU
    biased: bool = False

    def __str__(self) -> str:
        return f"{self.experts}x{self.hidden}x{self.intermediate}x{self.topk}"


SHAPES = {
    "qwen3-30b": LayerShape(128, 2048, 768, 8),
    "qwen3-235b": LayerShape(128, 4096, 1536, 8),
    "deepseek-v3": LayerShape(256, 7168, 2048, 8),
    "mixtral-8x7b": LayerShape(8, 4096, 14336, 2),
    "gpt-oss-120b": LayerShape(128, 2880, 2880, 4, SWIGLUOAI, biased=True),
    "gpt-oss-20b": LayerShape(32, 2880, 2880, 4, SWIGLUOAI, biased=True),
}
"""From the config.json of each release."""
_OTHER_NAMES = {"gpt-oss": "gpt-oss-120b"}


def model_name(name: str) -> str:
    """The name that results have of a model, for another one that it is known by; else `name`."""
    return _OTHER_NAMES.get(name, name)


def parse_shapes(text: str) -> dict[str, LayerShape]:
    """Shapes by name, separated by commas; `all` is all SHAPES. Raises as `parse_shape`."""
    names = chain.from_iterable(
        SHAPES if name == "all" else [model_name(name)] for name in text.split(",")
    )
    return {name: parse_shape(name) for name in names}


def parse_shape(text: str) -> LayerShape:
    """A shape by its name, or as ExHxIxT, with gated SiLU and without biases.

    Raises:
        ArgumentError: it is neither, or T is larger than E.
    """
    if (name := model_name(text)) in SHAPES:
        return SHAPES[name]
    match = re.fullmatch("x".join([r"([1-9]\d{0,11})"] * 4), text)
    if match is None:
        raise ArgumentError(
            f"unknown shape {text!r}; use {', '.join(SHAPES)}, all, or sizes such as "
            "128x2048x768x8: experts x hidden x intermediate x experts per token, each at least 1"
        )
    experts, hidden, intermediate, topk = map(int, match.groups())
    shape = LayerShape(experts, hidden, intermediate, topk)
    if shape.topk > shape.experts:
        raise ArgumentError(
            f"shape {text}: {shape.topk} experts per token, but only {shape.experts} experts"
        )
    return shape
