"""By how much GPTQ lowered the error of outputs, by the second moments of what was calibrated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    def ratio(self) -> float:
        """The error over that of the nearest codes; 1 where both are 0."""
        return self.error / self.nearest if self.nearest else 1.0

    def to_json(self) -> dict[str, Any]:
        """Its fields and the ratio."""
        return {**asdict(self), "ratio": self.ratio}


def merged_gptq_errors(errors: Iterable[GptqError]) -> list[GptqError]:
    """Errors merged by kind, in order of first appearance."""
    kinds: dict[tuple[str, str, str], GptqError] = {}
    for error in errors:
        kind = error.format, error.projection, error.device
        before = kinds.get(kind)
        kinds[kind] = error if before is None else _sum(before, error)
    return list(kinds.values())


def _sum(one: GptqError, other: GptqError) -> GptqError:
    return replace(
        one,
        weights=one.weights + other.weights,
        unchanged=one.unchanged + other.unchanged,
        nearest=one.nearest + other.nearest,
        error=one.error + other.error,
    )
