"""What writes the function that quantizes to a kind of formats, as `kernels` lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.formats import Format
    from moequant.native_code.vectors import Function
    from moequant.quantizers.elements import Source


class NativeKernel(ABC):
    """Writes one function, once.

    Args:
        format: what it quantizes to.
        source: how it reads weights.
        options: of the format, resolved.
    """

    @abstractmethod
    def __init__(self, format: Format, source: Source, options: Mapping[str, str]) -> None: ...

    @abstractmethod
    def write(self) -> Function:
        """The function, with the parameters of `new_kernel`; see `moequant.quantizers.kernels`."""

    @staticmethod
    def scratch_count(groups: int) -> int:
        """Numbers of float32 it has to be given as `scratch`, for so many groups in a row."""
        return 0

    @staticmethod
    def padded_importance(importance: Tensor, group: int) -> Tensor:
        """The importances of a weight's columns [K] as `write` reads them, contiguous.

        Args:
            importance: [K] float32.
            group: columns that share a scale.
        """
        return importance.contiguous()
