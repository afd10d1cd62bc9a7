"""The layout `stacked` with its scales in the order that kernels for SM100 read."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.runtime.backends.layout import Layout
from moequant.runtime.backends.stacked import STACKED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.runtime.weights import ExpertWeights
    from moequant.runtime.workload import Workload

_SCALES = ("w13_scale", "w2_scale")


class StackedScales(Layout):
    """`stacked`, with `w13_scale` and `w2_scale` as `encode` gives them."""

    formats: ClassVar[tuple[str, ...]]
    """Those that it holds."""
    multiple: ClassVar[int]
    """H and I are multiples of it."""

    @abstractmethod
    def encode(self, scale: Tensor, name: str) -> Tensor:
        """Scales in this order.

        Args:
            scale: [E, rows, groups].
            name: what errors call it.
        """

    @abstractmethod
    def decode(self, encoded: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """The inverse of `encode`, [E, rows, columns], a copy."""

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """See `Layout.pack`."""
        if weights.format not in self.formats:
            raise UnsupportedError(
                f"the layout {self.name} holds {' and '.join(self.formats)}, not {weights.format}"
            )
        if weights.hidden % self.multiple or weights.intermediate % self.multiple:
            raise UnsupportedError(
                f"the layout {self.name} holds H and I in multiples of {self.multiple}, not H "
                f"{weights.hidden} and I {weights.intermediate}; without quantized activations, no "
                "such layout is needed"
            )
        tensors = STACKED.pack(weights)
        return tensors | {name: self.encode(tensors[name], name) for name in _SCALES}

    def unpack(self, tensors: Mapping[str, Tensor], workload: Workload) -> ExpertWeights:
        """See `Layout.unpack`; scales are copies."""
        w, group = workload, get_format(workload.format).block[1]
        sizes = (
            ((1 + w.act_fn.gated) * w.intermediate, w.hidden // group),
            (w.hidden, w.intermediate // group),
        )
        plain = {
            name: self.decode(tensors[name], rows, columns, name)
            for name, (rows, columns) in zip(_SCALES, sizes, strict=True)
        }
        return STACKED.unpack({**tensors, **plain}, workload)
