"""The form in which kernels read the weights of a layer's experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.runtime.weights import ExpertWeights
    from moequant.runtime.workload import Workload


class Layout(ABC):
    """A lossless arrangement of weights as named tensors.

    The tensors are what a `FusedExperts` holds, what its `state_dict` saves and what
    `moequant prepare` writes. The first dimension of each is that of the experts, so that a layer
    can be packed and written expert by expert.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    """Incremented when the bytes of the same weights change."""

    @abstractmethod
    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """The tensors of `weights`, by name, on their device.

        Works on any device, "meta" included, which shows dtypes and shapes.

        Raises:
            UnsupportedError: the layout does not hold weights of this format or these sizes.
        """

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor], workload: Workload) -> ExpertWeights:
        """The inverse of `pack`, bit for bit: the weights in `tensors`, as views where it can be.

        Args:
            tensors: as `pack` makes them.
            workload: says the format, the sizes and the function between the GEMMs.

        Raises:
            CheckpointError: a tensor is not of the dtype or shape that the format and sizes say.
        """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"
