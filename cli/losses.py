"""What became of weights that were quantized before, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moequant.cli.output import Output


def show_losses(out: Output, losses: Iterable[Mapping[str, Any]]) -> None:
    """Print a row for each kind of weight: exact, or how far off it is from what it was."""
    out.table(
        ["role", "from", "to", ">weights", ">exact", ">error"],
        [
            (
                loss["role"],
                loss["source"],
                loss["format"],
                str(loss["weights"]),
                str(loss["exact"]),
                _error(loss),
            )
            for loss in losses
        ],
    )


def _error(loss: Mapping[str, Any]) -> str:
    if loss["exact"] == loss["weights"]:
        return "exact"
    error = loss["relative_error"]
    if error is None:
        return "-"
    return f"{error:.3%}" if error >= 1e-5 else f"{error:.1e}"
