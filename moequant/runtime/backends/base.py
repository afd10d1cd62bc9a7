"""What a backend is: the two GEMMs of every expert and what lies between them.

A call of `FusedExperts` is prepare (quantize activations, route, permute), a backend, and finalize
(weight, reduce). Only the middle differs from kernel to kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moequant.runtime.activations import Activations
    from moequant.runtime.routing import Permutation
    from moequant.runtime.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a backend is asked to run.

    Attributes:
        format: name of the format of the weights.
        activations: a scheme of `moequant.runtime.activations`.
        experts: E, on this device.
        hidden: H.
        intermediate: I.
        device: where weights and activations are.
    """

    format: str
    activations: str
    experts: int
    hidden: int
    intermediate: int
    device: torch.device


class Backend(ABC):
    """One way to run the experts of a layer: one file, and one line in REGISTRY."""

    name: ClassVar[str]
    default_on: ClassVar[tuple[str, ...]]
    """Types of device it is chosen on unasked; on others it runs only when named."""

    @abstractmethod
    def supports(self, workload: Workload) -> str | None:
        """None where it can run `workload`, else why not, in one clause."""

    @abstractmethod
    def run(
        self, activations: Activations, weights: ExpertWeights, permutation: Permutation
    ) -> Tensor:
        """Every expert's result for its rows, not yet weighted.

        Args:
            activations: M tokens of H columns.
            weights: the experts here.
            permutation: the rows of each expert.

        Returns:
            [M * T, H] float32 in the order of `permutation`; 0 in rows that belong to no expert.
        """
