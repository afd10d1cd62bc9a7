"""A plot of what `bench serve` measured: the share of the floor by batch, as SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.benchmarks.serving_engines import ENGINES
from moequant.svg import legend, picture, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_BAR, _GAP, _HEIGHT = 18, 22, 200
"""Widths of a bar and of the gap between batches, and height of a full share, in pixels."""
_LEFT, _TOP, _BOTTOM, _LEGEND = 60, 40, 46, 26


def plot_serving(document: Mapping[str, Any]) -> str:
    """An SVG picture of the document of `bench_serving`: a panel for each checkpoint.

    A bar is the share of the floor that an engine reaches in decoding, with its ms a step above it;
    an engine that was not timed has none. The axis ends at the floor, 1.
    """
    rows = document["checkpoints"]
    names = list(dict.fromkeys(e["engine"] for row in rows for e in row["engines"]))
    group = len(names) * _BAR + _GAP
    width = max(_LEFT + len(document["batches"]) * group + _GAP, _LEFT + 130 * len(names))
    panel = _TOP + _HEIGHT + _BOTTOM
    parts = list(legend({name: ENGINES[name].color for name in names}, _LEFT))
    for index, row in enumerate(rows):
        parts.append(f'<g transform="translate(0 {_LEGEND + index * panel})">')
        parts += _panel(row, document["batches"], names, width, group)
        parts.append("</g>")
    height = _LEGEND + len(rows) * panel
    return picture(width, height, parts)


def _panel(
    row: Mapping[str, Any], batches: Sequence[int], names: Sequence[str], width: int, group: int
) -> Iterator[str]:
    base = _TOP + _HEIGHT
    yield text(_LEFT, _TOP - 22, f"{row['name']}: share of the floor in decoding, and ms a step")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = base - share * _HEIGHT
        yield f'<line x1="{_LEFT}" x2="{width - 8}" y1="{y}" y2="{y}" stroke="#d0d7de"/>'
        yield text(_LEFT - 8, y + 4, f"{share:.0%}", anchor="end")
    timed = {engine["engine"]: engine for engine in row["engines"] if "error" not in engine}
    for place, batch in enumerate(batches):
        left = _LEFT + _GAP / 2 + place * group
        for index, name in enumerate(names):
            if name in timed:
                step = next(s for s in timed[name]["decode"] if s["batch"] == batch)
                yield from _bar(left + index * _BAR, base, step, ENGINES[name].color)
        middle = left + len(names) * _BAR / 2
        floor = row["floor_ms"][str(batch)]
        yield text(middle, base + 16, f"batch {batch}", anchor="middle")
        yield text(middle, base + 30, f"floor {floor:.2f} ms", anchor="middle")


def _bar(x: float, base: int, step: Mapping[str, Any], color: str) -> Iterator[str]:
    # Where a few weights stay in the L2 cache, a step may pass the floor.
    height = min(step["share_of_floor"], 1.1) * _HEIGHT
    yield (
        f'<rect x="{x}" y="{base - height:.1f}" width="{_BAR - 2}" height="{height:.1f}" '
        f'fill="{color}"/>'
    )
    at = f"{x + _BAR / 2:.1f} {base - height - 4:.1f}"
    yield (
        f'<text transform="translate({at}) rotate(-60)" font-size="9">'
        f"{step['ms_per_step']:.2f}</text>"
    )
