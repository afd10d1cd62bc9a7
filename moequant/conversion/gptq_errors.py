"""By how much GPTQ lowered the error of outputs, by the second moments of what was calibrated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GptqError:
    """What GPTQ made of weights of one kind.

    Attributes:
        format: their format.
        projection: gate, up or down.
        device: what computed: cpu, or the name of a GPU.
        weights: number of weights.
        unchanged: number of weights that kept the nearest codes, because GPTQ gained nothing.
        nearest: sum of the mean square errors of outputs, with the nearest codes.
        error: sum of the mean square errors of outputs, with the codes that were written.
    """

    format: str
    projection: str
    device: str
    weights: int
    unchanged: int
    nearest: float
    error: float

    @property
    def kind(self) -> tuple[str, str, str]:
        """What weights must share to be counted together."""
        return self.format, self.projection, self.device

    def __add__(self, other: GptqError) -> GptqError:
        """Both together; of one kind."""
        return replace(
            self,
            weights=self.weights + other.weights,
            unchanged=self.unchanged + other.unchanged,
            nearest=self.nearest + other.nearest,
            error=self.error + other.error,
        )

    @property
    def ratio(self) -> float:
        """The error over that of the nearest codes; 1 where both are 0."""
        return self.error / self.nearest if self.nearest else 1.0

    def to_json(self) -> dict[str, Any]:
        """Its fields and the ratio."""
        return {**asdict(self), "ratio": self.ratio}
