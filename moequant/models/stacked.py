"""Experts of a layer stacked in one tensor: which expert, rows and orientation are whose.

`gate_up` is [E, 2I, H] or, transposed, [E, H, 2I]; `down` is [E, H, I] or, transposed, [E, I, H].
Where `gate` and `up` have a tensor each, it is [E, I, H] or, transposed, [E, H, I]. Flat, the first
two dimensions are one: [E * I, H].
The rows of gate and up are interleaved (gate 0, up 0, gate 1, ...) or gate's come first. Nothing is
told from shapes, for `down` fits either way where H = I: the architecture table says it. Where a
user's does not, the sizes in config.json decide, and what they leave open is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.models.moe_config import MoeConfig

BIAS = "_bias"
"""What the biases of a stack are called, after its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the values of one weight, or of one part of it, lie.

    Attributes:
        tensor: name of the tensor on disk.
        expert: index in its first dimension; None where the tensor is this weight's alone.
        rows: of the rows [N, ...] found there, those that are this weight's; None for all.
        transposed: whether [K, N] lies there.
        height: extent of each expert in the tensor's first dimension, where experts have no
            dimension of their own: `expert` counts in steps of it.
        extents: what the tensor's first dimensions must be, where that was not checked before.
    """

    tensor: str
    expert: int | None = None
    rows: range | None = None
    transposed: bool = False
    height: int | None = None
    extents: tuple[int, ...] = ()


class StackedExperts:
    """A `stacked` table of architectures.toml: tensors that hold all experts of a layer."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        stacks = ("gate_up", "gate", "up", "down")
        self.tensors: dict[str, str] = {k: table[k] for k in stacks if k in table}
        """Pattern of the name, with {layer}, by what is stacked."""
        self._transposed: bool | list[str] | None = table.get("transposed")
        self.interleaved: bool = bool(table.get("interleaved"))
        self.biased: bool = table.get("biased", False)
        self.flat: bool = table.get("flat", False)

    def transposed(self, stack: str) -> bool | None:
        """Whether one of `tensors` is [E, K, N]; None where nobody says so."""
        if isinstance(self._transposed, list):
            return stack in self._transposed
        return self._transposed

    def stack_of(self, projection: str) -> str:
        """Where gate, up or down is stacked: one of `tensors`."""
        return projection if projection in self.tensors else "gate_up"

    def tensor(self, layer: int, projection: str) -> str:
        """The name of the tensor that holds a layer's gate, up or down."""
        return self.tensors[self.stack_of(projection)].format(layer=layer)

    def bias(self, layer: int, projection: str) -> str:
        """The name of the tensor that holds a layer's biases of gate, up or down."""
        return self.tensor(layer, projection) + BIAS

    def rows(self, projection: str, intermediate: int) -> range | None:
        """Which rows of what is stacked are those of gate, up or down; None for all."""
        if projection in self.tensors:
            return None
        first = 0 if projection == "gate" else 1
        if self.interleaved:
            return range(first, 2 * intermediate, 2)
        return range(first * intermediate, (first + 1) * intermediate)

    def place(
        self, layer: int, expert: int, projection: str, moe: MoeConfig, *, transposed: bool
    ) -> Place:
        """Where a plain checkpoint holds one expert's weight."""
        stack = self.stack_of(projection)
        return Place(
            tensor=self.tensor(layer, projection),
            expert=expert,
            rows=self.rows(projection, moe.intermediate),
            transposed=transposed,
            height=self._of_one(stack, moe, transposed)[0] if self.flat else None,
        )

    def shape(self, stack: str, moe: MoeConfig, *, transposed: bool) -> tuple[int, ...]:
        """[E, ...] of one of `tensors` in a plain checkpoint; flat, [E * ..., ...]."""
        rows, columns = self._of_one(stack, moe, transposed)
        return (moe.experts * rows, columns) if self.flat else (moe.experts, rows, columns)

    def _of_one(self, stack: str, moe: MoeConfig, transposed: bool) -> tuple[int, int]:
        """What one expert has of a stack, as it lies."""
        N, K = moe.shape("gate" if stack == "gate_up" else stack)
        N = 2 * N if stack == "gate_up" else N
        return (K, N) if transposed else (N, K)

    def bias_shape(self, stack: str, moe: MoeConfig) -> tuple[int, int]:
        """[E, N] of the biases of one of `tensors`."""
        N, _ = self._of_one(stack, moe, transposed=False)
        return moe.experts, N
