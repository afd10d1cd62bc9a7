"""Tensors that hold all experts of a layer: how one expert lies in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Where weights go that are written into tensors with all experts of a layer.

    Attributes:
        tensor: name of what holds them, without the dialect's suffixes.
        expert: which of them this is.
        experts: how many there are.
        interleaved: whether the rows of gate and up take turns.
        transposed: whether [K, N] lies there.
        flat: whether experts lie one below the other, with no dimension of their own.
    """

    tensor: str
    expert: int
    experts: int
    interleaved: bool
    transposed: bool = False
    flat: bool = False

    def name(self, suffix: str) -> str:
        """Name of the tensor on disk that holds parts called `suffix`; plain weights alone."""
        return self.tensor if suffix == "weight" else f"{self.tensor}_{suffix}"

    def piece(self, suffix: str) -> str:
        """What this expert's part of that tensor is called while it is written."""
        return f"{self.name(suffix)}[{self.expert}]"

    def shape(self, of_one: tuple[int, ...]) -> tuple[int, ...]:
        """Of a tensor that holds as much of every expert, each `of_one`."""
        if self.flat:
            return (self.experts * of_one[0], *of_one[1:])
        return (self.experts, *of_one)

    def joined_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Of what `join` makes of parts of these shapes."""
        rows, *rest = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return (*reversed(rest), rows) if self.transposed else (rows, *rest)

    def shape_of_one(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What of such a tensor one expert has."""
        return (shape[0] // self.experts, *shape[1:]) if self.flat else shape[1:]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Gate's and up's parts, or down's alone, as they lie in the stack."""
        if len(parts) == 1:
            joined = parts[0]
        elif self.interleaved:
            joined = torch.stack([*parts], 1).flatten(0, 1)
        else:
            joined = torch.cat([*parts])
        return joined.T.contiguous() if self.transposed else joined
