"""The requantization error: of weights that the source holds in a quantized form.

Each weight is dequantized as the source has it and as it was written, and the two are compared. It
is exact if every number is the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, kw_only=True)
class RequantizationError:
    """How far weights of one kind, as they were written, lie from what the source holds.

    Attributes:
        role: of the weights, in the architecture table.
        source: format they are stored in.
        format: format they were written in.
        weights: how many they are.
        exact: how many have every number unchanged.
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
    def relative_error(self) -> float:
        """||written - source|| / ||source||; 0 where all are exact."""
        if self.noise == 0:
            return 0.0
        return math.sqrt(self.noise / self.signal) if self.signal else math.inf

    def scaled(self, ratio: float) -> RequantizationError:
        """The same with the numbers on disk `ratio` times as large as those that were compared.

        That is of dialects of which one stores a reciprocal of the other's scale: 1 where it is
        exact, and else within 2**-23 of that. Squares are added, as if the two errors were
        independent.
        """
        if ratio == 1 or not self.signal:
            return self
        noise = self.noise + max(self.signal * (ratio - 1) ** 2, math.ulp(0.0))
        return replace(self, exact=0, noise=noise)

    def to_json(self) -> dict[str, Any]:
        """Plain data, all that `from_json` needs, and the relative error."""
        error = self.relative_error
        return {**asdict(self), "relative_error": error if math.isfinite(error) else None}

    @classmethod
    def from_json(cls, entry: object) -> RequantizationError | None:
        """Inverse of `to_json`; None for what it never makes."""
        texts, counts, sums = (
            ("role", "source", "format"),
            ("weights", "exact"),
            ("signal", "noise"),
        )
        if not isinstance(entry, dict):
            return None
        kinds = {**dict.fromkeys(texts, str), **dict.fromkeys(counts, int)}
        kinds |= dict.fromkeys(sums, float)
        if any(type(entry.get(key)) is not kind for key, kind in kinds.items()):
            return None
        return cls(**{key: entry[key] for key in kinds})


def error_of_tiles(tiles: Sequence[RequantizationError]) -> RequantizationError:
    """The error of one weight, given those of its tiles."""
    return replace(
        tiles[0],
        exact=int(all(tile.exact for tile in tiles)),
        signal=sum(tile.signal for tile in tiles),
        noise=sum(tile.noise for tile in tiles),
    )


def merged_errors(errors: Iterable[RequantizationError]) -> list[RequantizationError]:
    """Errors of weights of one kind taken together, in the order of their first."""
    kinds: dict[tuple[str, str, str], RequantizationError] = {}
    for error in errors:
        kind = error.role, error.source, error.format
        before = kinds.get(kind)
        kinds[kind] = error if before is None else _sum(before, error)
    return list(kinds.values())


def _sum(one: RequantizationError, other: RequantizationError) -> RequantizationError:
    return replace(
        one,
        weights=one.weights + other.weights,
        exact=one.exact + other.exact,
        signal=one.signal + other.signal,
        noise=one.noise + other.noise,
    )
