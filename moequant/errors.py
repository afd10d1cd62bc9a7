"""Every error that moequant raises on purpose, with its exit code, and its category of warnings.

A message names the thing, the value found, the value expected and the next step. Exit code 2 is
also click's for wrong usage, 130 is an interrupt.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from reprlib import repr as show
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class MoequantError(Exception):
    """Base class of all errors below; any other exception is a bug."""

    exit_code = 1


class ArgumentError(MoequantError):
    """Arguments that are malformed, or that do not go together: a call that can never be right."""

    exit_code = 2


class CheckpointError(MoequantError):
    """A checkpoint is malformed, incomplete or inconsistent."""

    exit_code = 3


class NonFiniteError(CheckpointError):
    """A weight holds NaN or Inf."""


class UnreachableError(CheckpointError):
    """The Hugging Face hub does not answer: no network, or a wrong HF_ENDPOINT."""


class UnsupportedError(MoequantError):
    """Valid input that moequant does not support: a shape, a dtype, an architecture, a device."""

    exit_code = 4


class DoesNotFitError(UnsupportedError):
    """Weights whose values a layout does not hold; another layout of the same backend may."""


class NumericsError(MoequantError):
    """An error beyond its limit, or bytes that differ from the expected ones."""

    exit_code = 5


class RecipeError(MoequantError):
    """An invalid recipe or format option."""

    exit_code = 6


class ArchitectureError(MoequantError):
    """An invalid description of an architecture."""

    exit_code = 6


class StatisticsError(MoequantError):
    """Statistics of activations that are invalid, or that belong to another model."""

    exit_code = 6


class DataError(MoequantError):
    """Text or token ids for calibration, or figures of an evaluation, that cannot be used."""

    exit_code = 6


class SlowPathWarning(RuntimeWarning):
    """Something takes longer than it would on another machine or with another package."""


def unknown_name(
    kind: str, name: object, known: Iterable[str], *, nearest: Sequence[str] = ()
) -> str:
    """Message that no `kind` is called `name`, with all known names and the nearest ones.

    The nearest are up to three that begin with `name`, or else the one that is spelt most alike.

    Args:
        kind: what is named, such as "dialect".
        name: the name given.
        known: the names there are.
        nearest: known names that are meant more likely than those that are spelt alike.
    """
    known = list(known)
    meant = list(nearest) or nearest_names(name, known)
    question = f". Did you mean {' or '.join(meant)}?" if meant else ""
    return f"unknown {kind} {show(name)}; use one of: {', '.join(known)}{question}"


_ALIKE = 0.76
"""Share of letters from which on names are alike: "tirton" and "triton", not "b100" and "h100"."""


def nearest_names(name: object, known: Iterable[str]) -> list[str]:
    """Up to three names that begin with `name`, or else the one that is spelt most alike."""
    by_lower = {one.lower(): one for one in known}
    given = str(name).lower()
    # Most of what is unknown is a name whose end was left out.
    begun = [one for lower, one in by_lower.items() if _begins(lower, given)]
    begun = begun or [
        one for lower, one in by_lower.items() if _begins(_plain(lower), _plain(given))
    ]
    misspelt = [one for one in by_lower if not _differs_by_number(given, one)]
    alike = get_close_matches(given, misspelt, n=1, cutoff=_ALIKE)
    return begun[:3] or [by_lower[one] for one in alike]


def _begins(known: str, given: str) -> bool:
    """Whether a name begins with what is given, and not in the middle of a number: h20, h200."""
    rest = known.removeprefix(given)
    return bool(given) and rest != known and not (given[-1].isdigit() and rest[:1].isdigit())


def _plain(name: str) -> str:
    """A name without what separates its parts."""
    return re.sub(r"[-_. ]", "", name)


def _differs_by_number(given: str, known: str) -> bool:
    """Whether two names are the same but for digits: sm120 is no misspelling of sm100."""
    return given != known and re.sub(r"\d+", "", given) == re.sub(r"\d+", "", known)
