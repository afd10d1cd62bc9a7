"""Where each expert's weight lies in a tensor that stacks all experts of a layer.

`gate_up` is [E, 2I, H] or, transposed, [E, H, 2I]; `down` is [E, H, I] or, transposed, [E, I, H].
Where `gate` and `up` have a tensor each, it is [E, I, H] or, transposed, [E, H, I]. A flat stack
merges the first two dimensions: [E * I, H].
The rows of gate and up are interleaved (gate 0, up 0, gate 1, ...), or all gate rows come first.
The architecture table gives the orientation, because shapes cannot: `down` fits both if H = I. If a
user's description omits it, the sizes in config.json decide, and an ambiguous shape is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.models.moe_config import MoeConfig

BIAS = "_bias"
"""Suffix of the name of a stack's biases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one weight, or one part of it, lies in a tensor.

    Attributes:
        tensor: name of the tensor on disk.
        expert: index in its first dimension; None if the tensor holds only this weight.
        rows: which of the rows [N, ...] there belong to this weight; None for all.
        transposed: whether it is stored as [K, N].
        height: size of one expert along the first dimension of a flat stack, where expert e
            begins at e * height; None if experts have a dimension of their own.
        extents: the shape that the tensor must have, if not yet checked; else empty.
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
        """Name pattern, with {layer}, of each stack: gate_up, gate, up and down."""
        self._transposed: bool | list[str] | None = table.get("transposed")
        self.interleaved: bool = bool(table.get("interleaved"))
        self.biased: bool = table.get("biased", False)
        self.flat: bool = table.get("flat", False)

    def transposed(self, stack: str) -> bool | None:
        """Whether a stack is [E, K, N]; None if the description does not say."""
        if isinstance(self._transposed, list):
            return stack in self._transposed
        return self._transposed

    def orientations(self, stack: str, moe: MoeConfig, shape: tuple[int, ...]) -> list[bool]:
        """Whether a stack is transposed: what the description says, else what fits its shape."""
        if (declared := self.transposed(stack)) is not None:
            return [declared]
        return [t for t in (False, True) if self.shape(stack, moe, transposed=t) == shape]

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
        """Which rows of its stack belong to gate, up or down; None for all."""
        if projection in self.tensors:
            return None
        first = 0 if projection == "gate" else 1
        if self.interleaved:
            return range(first, 2 * intermediate, 2)
        return range(first * intermediate, (first + 1) * intermediate)

    def place(
        self, layer: int, expert: int, projection: str, moe: MoeConfig, *, transposed: bool
    ) -> Place:
        """Where one expert's weight lies in a plain checkpoint."""
        stack = self.stack_of(projection)
        return Place(
            tensor=self.tensor(layer, projection),
            expert=expert,
            rows=self.rows(projection, moe.intermediate),
            transposed=transposed,
            height=self._of_one(stack, moe, transposed)[0] if self.flat else None,
        )

    def shape(self, stack: str, moe: MoeConfig, *, transposed: bool) -> tuple[int, ...]:
        """Shape of a stack in a plain checkpoint: [E, ...], or [E * ..., ...] if flat."""
        rows, columns = self._of_one(stack, moe, transposed)
        return (moe.experts * rows, columns) if self.flat else (moe.experts, rows, columns)

    def _of_one(self, stack: str, moe: MoeConfig, transposed: bool) -> tuple[int, int]:
        """Shape of one expert in a stack, as stored."""
        N, K = moe.shape("gate" if stack == "gate_up" else stack)
        N = 2 * N if stack == "gate_up" else N
        return (K, N) if transposed else (N, K)

    def bias_shape(self, stack: str, moe: MoeConfig) -> tuple[int, int]:
        """Shape [E, N] of a stack's biases."""
        N, _ = self._of_one(stack, moe, transposed=False)
        return moe.experts, N
