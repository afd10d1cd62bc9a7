"""Requantization errors, of weights that are quantized in the source.

Each weight is dequantized from the source and from the output, and the two are compared. It is
exact if every number is equal.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class RequantizationError:
    """The requantization error of weights of one kind.

    Attributes:
        role: role of the weights, in the architecture table.
        source: format in the source.
        format: format in the output.
        weights: number of weights.
        exact: number of weights with every number unchanged.
        signal: sum of squares of the source's numbers.
        noise: sum of squares of the differences.
    """

    role: str
    source: str
    format: str
    weights: int
    exact: int
    signal: float
    noise: float

    @property
    def kind(self) -> tuple[str, str, str]:
        """What weights must share to be counted together."""
        return self.role, self.source, self.format

    def __add__(self, other: RequantizationError) -> RequantizationError:
        """Both together; of one kind."""
        return replace(
            self,
            weights=self.weights + other.weights,
            exact=self.exact + other.exact,
            signal=self.signal + other.signal,
            noise=self.noise + other.noise,
        )

    @property
    def relative_error(self) -> float:
        """||written - source|| / ||source||; 0 where all are exact."""
        if self.noise == 0:
            return 0.0
        return math.sqrt(self.noise / self.signal) if self.signal else math.inf

    def scaled(self, ratio: float) -> RequantizationError:
        """The error if the numbers on disk are `ratio` times those that were compared.

        The ratio differs from 1, by at most 2**-23, if one dialect stores the reciprocal of the
        other's scale and it is not exact. Squares are added, as for independent errors.
        """
        if ratio == 1 or not self.signal:
            return self
        noise = self.noise + max(self.signal * (ratio - 1) ** 2, math.ulp(0.0))
        return replace(self, exact=0, noise=noise)

    def to_json(self) -> dict[str, Any]:
        """Its fields and the relative error, None if that is infinite."""
        error = self.relative_error
        return {**asdict(self), "relative_error": error if math.isfinite(error) else None}


def error_of_tiles(tiles: Sequence[RequantizationError]) -> RequantizationError:
    """The error of one weight, given those of its tiles."""
    return replace(
        tiles[0],
        exact=int(all(tile.exact for tile in tiles)),
        signal=sum(tile.signal for tile in tiles),
        noise=sum(tile.noise for tile in tiles),
    )
