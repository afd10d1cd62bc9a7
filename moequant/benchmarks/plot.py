"""A picture of a benchmark of experts: time over the floor, each contender, a panel a layer."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS = "moequant"
_MOST_COLUMNS = 3


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
    """Write a PNG of what `ExpertsBenchmark.document` holds: a panel a layer, time over floor.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OSError: `path` cannot be written.
    """
    check_plots()
    from matplotlib import rc_context

    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with rc_context({"text.parse_math": False}):  # names may hold a $
            _figure(document).savefig(unfinished, format="png", dpi=150)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _figure(document: Mapping[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    layers = document["layers"]
    columns = min(len(layers), _MOST_COLUMNS)
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(max(3.4 * columns, 5), 2.8 * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    names = dict.fromkeys(n for layer in layers for cell in layer["cells"] for n in cell["times"])
    colors = {name: f"C{index}" for index, name in enumerate(names)}
    for panel, layer in zip_longest(panels.flat, layers):
        if layer is None:
            panel.set_axis_off()
        else:
            _draw(panel, layer, colors)
    for panel in panels[:, 0]:
        panel.set_ylabel("time / floor")
    top = panels[0, 0].get_ylim()[1]  # all share it
    panels[0, 0].set_ylim(0.75, max(top, 2))  # room for figures below the floor
    lines = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2 * columns)
    figure.suptitle(
        f"{document['format']} experts, {document['machine']['gpu']}: time of a call over the floor"
        "\nfigures: microseconds of moequant",
        fontsize=10,
    )
    return figure


def _draw(panel: Axes, layer: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    cells = layer["cells"]
    for name, color in colors.items():
        here = [cell for cell in cells if name in cell["times"]]
        over = [cell["times"][name]["median_us"] / cell["floor_us"] for cell in here]
        tokens = [cell["tokens"] for cell in here]
        front = 3 if name == _OURS else 2
        panel.plot(
            tokens, over, marker="o", markersize=4, color=color, label=name, zorder=front,
            linewidth=2 if name == _OURS else 1.2,
        )  # fmt: skip
    panel.axhline(1, linestyle="--", color="black", linewidth=1, label="floor")
    for cell in cells:
        us = cell["times"][_OURS]["median_us"]
        panel.text(
            cell["tokens"], 0.03, f"{us:.1f}" if us < 100 else f"{us:.0f}", fontsize=8,
            color=colors[_OURS], ha="center", transform=panel.get_xaxis_transform(),
        )  # fmt: skip
    panel.set(xscale="log", yscale="log", xlabel="tokens")
    panel.set_xticks([cell["tokens"] for cell in cells], [str(cell["tokens"]) for cell in cells])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter("{x:g}")
    panel.margins(x=0.1)
    panel.tick_params(labelsize=8)
    what = f"{layer['act_fn']}, biases" if layer["biased"] else layer["act_fn"]
    panel.set_title(f"{layer['shape']} ({what})", fontsize=9)
    panel.grid(visible=True, alpha=0.3)
