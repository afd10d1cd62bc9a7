"""Tensors that stack all experts of a layer, and the position of one expert in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The stack that an expert's weights are written to.

    Attributes:
        tensor: name of the stack, without the dialect's suffixes.
        expert: index of the expert.
        experts: number of experts.
        interleaved: whether the rows of gate and up are interleaved.
        transposed: whether it is stored as [K, N].
        flat: whether experts have no dimension of their own: [E * N, K].
    """

    tensor: str
    expert: int
    experts: int
    interleaved: bool
    transposed: bool = False
    flat: bool = False

    def name(self, suffix: str) -> str:
        """Name of the tensor on disk for parts called `suffix`."""
        return self.tensor if suffix == "weight" else f"{self.tensor}_{suffix}"

    def piece(self, suffix: str) -> str:
        """Name of this expert's part of that tensor during writing."""
        return f"{self.name(suffix)}[{self.expert}]"

    def shape(self, of_one: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a stack in which each expert has the shape `of_one`."""
        if self.flat:
            return (self.experts * of_one[0], *of_one[1:])
        return (self.experts, *of_one)

    def joined_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of the result of `join` for parts of these shapes."""
        rows, *rest = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return (*reversed(rest), rows) if self.transposed else (rows, *rest)

    def shape_of_one(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one expert in a stack of this shape."""
        return (shape[0] // self.experts, *shape[1:]) if self.flat else shape[1:]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of gate and up, or of down, in the order of the stack."""
        if len(parts) == 1:
            joined = parts[0]
        elif self.interleaved:
            joined = torch.stack([*parts], 1).flatten(0, 1)
        else:
            joined = torch.cat([*parts])
        return joined.T.contiguous() if self.transposed else joined
