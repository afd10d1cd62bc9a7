"""A picture of a benchmark of experts: time over tokens, each contender and the floor."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def check_plots() -> None:
    """Ask, before anything is measured, whether it can be drawn.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "a plot wants matplotlib, which is not installed: pip install 'moequant[plot]'"
        )


def plot_experts(document: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of what `ExpertsBenchmark.document` holds.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OSError: `path` cannot be written.
    """
    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    cells = document["cells"]
    tokens = [cell["tokens"] for cell in cells]
    names = dict.fromkeys(name for cell in cells for name in cell["times"])
    for name in names:
        here = [cell for cell in cells if name in cell["times"]]
        medians = [cell["times"][name]["median_us"] for cell in here]
        axes.plot([cell["tokens"] for cell in here], medians, marker="o", label=name)
    floors = [cell["floor_us"] for cell in cells]
    axes.plot(tokens, floors, linestyle="--", color="gray", label="floor")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="us a call")
    axes.set_xticks(tokens, [str(M) for M in tokens])
    axes.minorticks_off()
    axes.set_title(f"{document['shape']}, {document['format']}, {document['machine']['gpu']}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
