"""Tensors that stack all experts of a layer, and the position of one expert in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moequant.models import ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moequant.models import Model
    from moequant.weights.encoded import EncodedInfo


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


def stack_of(name: str, model: Model) -> Stack | None:
    """The position of a weight in a dialect that stacks experts; None if it is not an expert's."""
    role, stacked = model.roles[name], model.architecture.stacked
    if role.role != ROUTED_EXPERTS:
        return None
    assert stacked is not None, "the table allows such a dialect only with `stacked`"
    assert role.layer is not None, name
    assert role.expert is not None, name
    assert role.projection is not None, name
    return Stack(
        tensor=stacked.tensor(role.layer, role.projection),
        expert=role.expert,
        experts=model.moe.experts,
        interleaved=stacked.interleaved,
    )


def plain_stack(info: EncodedInfo, model: Model, *, stacked: bool) -> Stack | None:
    """The position of a weight in a stack of the BF16 release; None if it is separate."""
    role, table = model.roles[info.name], model.architecture.stacked
    in_stack = next(iter(info.places.values())).expert is not None
    if table is None or role.role != ROUTED_EXPERTS or not (stacked or in_stack):
        return None
    assert role.projection is not None, info.name
    turned = table.transposed(table.stack_of(role.projection))
    if turned is None:
        assert not in_stack, "the table says it of those that a dialect stacks"
        return None
    stack = stack_of(info.name, model)
    assert stack is not None, info.name
    return replace(stack, transposed=turned, flat=table.flat)
