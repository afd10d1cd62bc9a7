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
    `moequant prepare` writes. Their names are free, but for two, by which the runtime sees what
    there is:

        w2_bias          if and only if the experts have a `down_bias`
        w13_input_scale  [1] or [E] float32, if and only if there is a `gate_up_input_scale`

    `stack_biases`, `name_input_scales` and their inverses in `moequant.runtime.backends.stacked`
    are for layouts that do not permute biases. The first dimension of every tensor is that of the
    experts, unless one static scale is for all of them, and no expert's part depends on the others,
    so that a layer can be packed and written expert by expert.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    """Incremented when the bytes of the same weights change."""
    why: ClassVar[str] = ""
    """For which weights it is, as a phrase for users; empty if it is its backend's first."""

    @abstractmethod
    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """The tensors of `weights`, by name, on their device.

        Contiguous. Works on any device and for any E, "meta" and 0 included: "meta" shows dtypes
        and shapes.

        Raises:
            DoesNotFitError: nor weights with such values, which the next of a backend's layouts
                may hold; not on "meta".
            UnsupportedError: the layout does not hold weights of this format or these sizes.
        """

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor], workload: Workload) -> ExpertWeights:
        """The inverse of `pack`: the weights in `tensors`, as views where it can be.

        Codes and scales have the same bits. Biases may come back in float32, and as zeros where one
        of gate and up had none.

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
