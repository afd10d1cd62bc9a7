"""Codes and scales: how many are zero, at the largest value, or no numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.reporting.charts import histogram
from moequant.reporting.markup import Markup, element, table
from moequant.reporting.words import percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def code_section(output: Mapping[str, Any]) -> Markup:
    """A table, and histograms of each format; empty if nothing is quantized or could be read."""
    formats = output["codes"]
    if not formats:
        return Markup("")
    partly = any(one["counted"] < one["weights"] for one in formats)
    return element(
        "section",
        element("h2", "Codes and scales"),
        element(
            "p",
            "Of the files, without a source. Codes at the largest value are usual: a format's "
            "scale maps the largest weight of a block to it. Zero, infinite and NaN scales are "
            "not, unless all weights of a block are zero.",
            " Of a large checkpoint, evenly spread weights are counted, and rows of each."
            if partly
            else "",
        ),
        _table(formats),
        *(figure for one in formats for figure in _figures(one)),
    )


def _table(formats: Sequence[Mapping[str, Any]]) -> Markup:
    rows = [
        (
            one["format"],
            f"{one['counted']} of {one['weights']}",
            f"{one['codes']:,}",
            _share(one["zero"], one["codes"]),
            _share(one["saturated"], one["codes"]),
            f"{one['nan']:,}",
            f"{one['scales']:,}",
            f"{one['zero_scales']:,}",
            f"{one['nan_scales']:,}",
        )
        for one in formats
    ]
    columns = [
        "format", ">weights counted", ">codes", ">zero", ">at the largest value", ">NaN",
        ">scales", ">zero", ">NaN or infinite",
    ]  # fmt: skip
    return table(columns, rows, caption="Codes and scales that were counted")


def _share(part: int, whole: int) -> str:
    return percent(part / whole if whole else None)


def _figures(one: Mapping[str, Any]) -> Iterator[Markup]:
    name = one["format"]
    charts = {
        "Scales, by power of two": histogram(
            f"Scales of {name} by power of two",
            _exponents(one["scales_by_exponent"]),
            axis="2 to the power of",
        ),
        "Weights, by share of zero codes": histogram(
            f"Weights of {name} by share of zero codes",
            _bins(one["weights_by_zero"]),
            axis="% of a weight's codes that are zero",
        ),
        "Weights, by share of codes at the largest value": histogram(
            f"Weights of {name} by share of codes at the largest value",
            _bins(one["weights_by_saturated"]),
            axis="% of a weight's codes at the largest value",
        ),
    }
    figures = [
        element("figure", element("figcaption", f"{name}: {title}"), chart)
        for title, chart in charts.items()
        if chart
    ]
    yield element("div", figures, class_="row")


def _exponents(pairs: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    if not pairs:
        return []
    counts = {pair[0]: pair[1] for pair in pairs}
    return [(str(e), counts.get(e, 0)) for e in range(min(counts), max(counts) + 1)]


def _bins(counts: Sequence[int]) -> list[tuple[str, int]]:
    """Counts with the lower ends of their bins, without empty bins behind the last that is not."""
    last = max((place for place, number in enumerate(counts) if number), default=-1)
    step = 100 // len(counts)
    return [(str(place * step), number) for place, number in enumerate(counts[: last + 2])]
