"""Collect what is found, in memory that does not grow with the checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from moequant.conversion import merged_errors
from moequant.verification.report import FormatSummary, GroupErrors, Problem, WeightCheck

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moequant.conversion import RequantizationError
    from moequant.models import TensorRole
    from moequant.verification.report import Check

KEPT_PROBLEMS = 50
"""Problems of one check that a report contains; the others are counted."""
MOST_CHARACTERS = 2000
"""Longest name or message in a report."""
KEPT_WEIGHTS = 20
"""Number of weights listed as the worst ones."""


class Findings:
    """Problems, in the order they were found."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._counts: Counter[Check] = Counter()

    @property
    def count(self) -> int:
        """The number of problems, including those left out."""
        return self._counts.total()

    def has(self, check: Check) -> bool:
        """Whether a check found a problem."""
        return check in self._counts

    def add(self, check: Check, name: str, message: str, **flags: bool) -> None:
        """Add a problem of `name`; `flags` are those of `Problem`, such as `stray`."""
        self.extend([Problem(check=check, name=cut(name), message=cut(message), **flags)])

    def extend(self, problems: Iterable[Problem]) -> None:
        """Add several problems."""
        for problem in problems:
            self._counts[problem.check] += 1
            if self._counts[problem.check] <= KEPT_PROBLEMS:
                self.problems.append(problem)


def cut(text: str) -> str:
    """Shorten a text from an untrusted file."""
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "..."


class WeightChecks:
    """Errors of weights: sums by format and by layer, one number an expert, and the worst ones.

    Args:
        roles: the role of every weight, by its name.
    """

    def __init__(self, roles: Mapping[str, TensorRole]) -> None:
        self.worst: list[WeightCheck] = []
        """The worst weights, worst first."""
        self.requantization_errors: list[RequantizationError] = []
        """The requantization errors by kind."""
        self.not_finite: list[str] = []
        """The copied tensors that hold NaN or Inf, each with the first one, in words."""
        self._roles = roles
        self._by_format: dict[str, _Sum] = {}
        self._groups: dict[tuple[TensorRole, str], _Group] = {}

    def add(self, check: WeightCheck) -> None:
        """Add the error of one weight."""
        worst = sorted([*self.worst, check], key=lambda c: (_rank(c), c.name), reverse=True)
        self.worst = worst[:KEPT_WEIGHTS]
        self._by_format.setdefault(check.format, _Sum(check)).add(check)
        role = self._roles[check.name]
        key = replace(role, expert=None), check.format
        self._groups.setdefault(key, _Group()).add(check, role.expert)

    def add_requantization_errors(self, errors: Iterable[RequantizationError]) -> None:
        """Add requantization errors."""
        self.requantization_errors = merged_errors([*self.requantization_errors, *errors])

    def summaries(self) -> tuple[FormatSummary, ...]:
        """One summary per format."""
        return tuple(total.summary() for total in self._by_format.values())

    def groups(self) -> tuple[GroupErrors, ...]:
        """The errors by role, layer and projection."""
        return tuple(group.errors(*key) for key, group in self._groups.items())


class _Group:
    """Errors of the weights of one role, layer, projection and format."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0
        self._count = 0
        self._experts: dict[int, float] = {}

    def add(self, check: WeightCheck, expert: int | None) -> None:
        self._count += 1
        self._signal += check.signal**2
        self._noise += check.noise**2
        if expert is not None:
            self._experts[expert] = check.relative_error

    def errors(self, role: TensorRole, format: str) -> GroupErrors:
        total = WeightCheck(
            name="", format=format, signal=math.sqrt(self._signal), noise=math.sqrt(self._noise)
        )
        found = map(self._experts.get, range(max(self._experts, default=-1) + 1))
        return GroupErrors(
            role=role.role,
            layer=role.layer,
            projection=role.projection,
            format=format,
            weights=self._count,
            relative_error=total.relative_error,
            experts=tuple(e if e is not None and math.isfinite(e) else None for e in found),
        )


class _Sum:
    """Squared norms of all weights of a format."""

    def __init__(self, first: WeightCheck) -> None:
        self._worst = first
        self._count = 0
        self._squares: dict[str, float] = {}

    def add(self, error: WeightCheck) -> None:
        self._count += 1
        self._worst = max(self._worst, error, key=_rank)
        for kind in ("signal", "noise", "effective_noise", "reference_noise"):
            if (norm := getattr(error, kind)) is not None:
                self._squares[kind] = self._squares.get(kind, 0.0) + norm**2

    def summary(self) -> FormatSummary:
        norms = {kind: math.sqrt(square) for kind, square in self._squares.items()}
        total = WeightCheck(name="", format=self._worst.format, **norms)
        return FormatSummary(total=total, weights=self._count, worst=self._worst)


def _rank(error: WeightCheck) -> float:
    """Sort key by which NaN is worse than any other error."""
    return math.inf if math.isnan(error.relative_error) else error.relative_error
