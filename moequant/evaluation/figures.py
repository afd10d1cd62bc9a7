"""The figures of an evaluation.

Their definitions are those of llama.cpp's `llama-perplexity --kl-divergence`, but for standard
errors, which are over windows here, because positions of one window are not independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moequant.evaluation.predictions import Predictions


@dataclass(frozen=True, kw_only=True)
class SectionFigures:
    """Figures of one section.

    Attributes:
        section: its index in the data.
        windows: how many windows it has.
        perplexity_reference: of the reference.
        perplexity: of the test.
        kl_mean: over its positions, in nats.
        kl_mean_se: standard error over its windows; None for one window.
        same_top: share of positions with the same most probable token.
    """

    section: int
    windows: int
    perplexity_reference: float
    perplexity: float
    kl_mean: float
    kl_mean_se: float | None
    same_top: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one test; KL(reference || test) in nats.

    Attributes:
        positions: predictions that are compared.
        perplexity_reference: exp of the mean negative log-likelihood of the reference.
        perplexity: the same of the test.
        nll_difference: mean of ln p_reference - ln p_test of the next token.
        nll_difference_se: its standard error over windows; None for one window.
        kl_mean: over positions.
        kl_mean_se: standard error over windows; None for one window.
        kl_median: over positions.
        kl_99: 99th percentile, interpolated linearly between positions.
        kl_999: 99.9th percentile.
        kl_max: the largest.
        same_top: share of positions with the same most probable token.
        sections: the same by section, without those that have no window.
        kl_by_window: mean of each window, for paired comparisons.
    """

    positions: int
    perplexity_reference: float
    perplexity: float
    nll_difference: float
    nll_difference_se: float | None
    kl_mean: float
    kl_mean_se: float | None
    kl_median: float
    kl_99: float
    kl_999: float
    kl_max: float
    same_top: float
    sections: tuple[SectionFigures, ...]
    kl_by_window: tuple[float, ...]


def figures_of(found: Predictions, sections: Sequence[int]) -> Figures:
    """The figures of predictions, of which window w belongs to section `sections[w]`."""
    by_window = found.kl.mean(1)
    difference = (found.nll_test - found.nll_reference).mean(1)
    ordered = found.kl.flatten().sort().values
    return Figures(
        positions=found.kl.numel(),
        perplexity_reference=_perplexity(found.nll_reference),
        perplexity=_perplexity(found.nll_test),
        nll_difference=float(difference.mean()),
        nll_difference_se=_standard_error(difference),
        kl_mean=float(by_window.mean()),
        kl_mean_se=_standard_error(by_window),
        kl_median=_percentile(ordered, 0.5),
        kl_99=_percentile(ordered, 0.99),
        kl_999=_percentile(ordered, 0.999),
        kl_max=float(ordered[-1]),
        same_top=_share(found.same_top),
        sections=tuple(_section(found, sections, n) for n in sorted(set(sections))),
        kl_by_window=tuple(by_window.tolist()),
    )


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The mean KL divergence of one test over that of another, of the same windows.

    Attributes:
        ratio: of the means.
        se: its standard error by a jackknife over windows; None for one window, or where all of
            the divergence is in one.
    """

    ratio: float
    se: float | None


def kl_ratio(one: Figures, other: Figures) -> Ratio | None:
    """How much more `one` diverges than `other`; None where `other` does not diverge at all.

    Windows differ more from each other than two tests do in one window, so that a paired ratio is
    known better than either mean.
    """
    pairs = list(zip(one.kl_by_window, other.kl_by_window, strict=True))
    total, reference = math.fsum(one.kl_by_window), math.fsum(other.kl_by_window)
    if reference <= 0:
        return None
    ratio, count = total / reference, len(pairs)
    # With one window of `other` left out, nothing may be left to divide by.
    if count < 2 or any(reference - kl <= 0 for _, kl in pairs):
        return Ratio(ratio=ratio, se=None)
    left_out = [(total - a) / (reference - b) for a, b in pairs]
    mean = math.fsum(left_out) / count
    squares = math.fsum((one_left_out - mean) ** 2 for one_left_out in left_out)
    return Ratio(ratio=ratio, se=math.sqrt((count - 1) / count * squares))


def _section(found: Predictions, sections: Sequence[int], section: int) -> SectionFigures:
    rows = [index for index, one in enumerate(sections) if one == section]
    by_window = found.kl[rows].mean(1)
    return SectionFigures(
        section=section,
        windows=len(rows),
        perplexity_reference=_perplexity(found.nll_reference[rows]),
        perplexity=_perplexity(found.nll_test[rows]),
        kl_mean=float(by_window.mean()),
        kl_mean_se=_standard_error(by_window),
        same_top=_share(found.same_top[rows]),
    )


def _perplexity(nll: Tensor) -> float:
    return float(nll.mean().exp())


def _share(found: Tensor) -> float:
    return float(found.double().mean())


def _standard_error(by_window: Tensor) -> float | None:
    """Of a mean over windows, whose own mean squared deviation has n - 1 degrees of freedom."""
    if len(by_window) < 2:
        return None
    return float(by_window.std() / math.sqrt(len(by_window)))


def _percentile(ordered: Tensor, share: float) -> float:
    """Between the two values next to `share` of the last index, linearly."""
    # Not torch.quantile, which takes at most 16 million.
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = float(ordered[below]), float(ordered[above])
    return low + (high - low) * (place - below)
