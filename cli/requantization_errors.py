"""The requantization error of weights that were quantized before, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moequant.cli.output import Output


def show_requantization_errors(out: Output, errors: Iterable[Mapping[str, Any]]) -> None:
    """Print a row for each kind of weight: exact, or its relative error."""
    out.table(
        ["role", "from", "to", ">weights", ">exact", ">error"],
        [
            (
                error["role"],
                error["source"],
                error["format"],
                str(error["weights"]),
                str(error["exact"]),
                _error(error),
            )
            for error in errors
        ],
    )


def _error(error: Mapping[str, Any]) -> str:
    if error["exact"] == error["weights"]:
        return "exact"
    relative = error["relative_error"]
    if relative is None:
        return "-"
    return f"{relative:.3%}" if relative >= 1e-5 else f"{relative:.1e}"
