"""The requantization error: of weights that the source holds in a quantized form.

Each weight is dequantized as the source has it and as it was written, and the two are compared. It
is exact if every number is the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from moequant.formats import QuantizedWeight, dtype_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moequant.formats import StoredWeight
    from moequant.quantizers import Quantizer


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


def measure(
    before: StoredWeight, after: StoredWeight, *, quantizer: Quantizer, role: str, format: str
) -> RequantizationError:
    """Compare a weight [N, K] as it is stored with what was written of it.

    Args:
        before: as it is stored.
        after: what was written.
        quantizer: decodes and compares; whichever it is, the sums are the same.
        role: of the weight.
        format: format it was written in.
    """
    signal, noise = quantizer.compare(before, after)
    return RequantizationError(
        role=role,
        source=before.format if isinstance(before, QuantizedWeight) else dtype_text(before.dtype),
        format=format,
        weights=1,
        exact=int(noise == 0),
        signal=signal,
        noise=noise,
    )


def with_ratio(error: RequantizationError, ratio: float) -> RequantizationError:
    """What `measure` found, with the numbers on disk `ratio` times farther apart.

    That is of dialects of which one stores a reciprocal of the other's scale: 1 where it is exact,
    and else within 2**-23 of that. Squares are added, as if the two errors were independent.
    """
    if ratio == 1 or not error.signal:
        return error
    noise = error.noise + max(error.signal * (ratio - 1) ** 2, math.ulp(0.0))
    return replace(error, exact=0, noise=noise)


def merged(errors: Iterable[RequantizationError]) -> list[RequantizationError]:
    """Errors of weights of one kind taken together, in the order of their first."""
    kinds: dict[tuple[str, str, str], RequantizationError] = {}
    for error in errors:
        kind = error.role, error.source, error.format
        before = kinds.get(kind)
        kinds[kind] = error if before is None else _sum(before, error)
    return list(kinds.values())


def _sum(one: RequantizationError, other: RequantizationError) -> RequantizationError:
    return RequantizationError(
        role=one.role,
        source=one.source,
        format=one.format,
        weights=one.weights + other.weights,
        exact=one.exact + other.exact,
        signal=one.signal + other.signal,
        noise=one.noise + other.noise,
    )
