"""What each expert saw in calibration, and whose statistics are its layer's."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from moequant.reporting.heat_map import Scale, color_key, heat_map
from moequant.reporting.markup import Markup, element, table
from moequant.reporting.words import number
from moequant.units import ranges

if TYPE_CHECKING:
    from collections.abc import Mapping


def calibration_section(calibration: Mapping[str, Any]) -> Markup:
    """A heat map of tokens, and a table of layers."""
    layers, prior = calibration["layers"], calibration["prior_tokens"]
    unrouted = sum(len(layer["unrouted"]) for layer in layers)
    few = sum(len(layer["mostly_pooled"]) for layer in layers)
    data = calibration["data"]
    tokens = {layer["layer"]: layer["tokens"] for layer in layers}
    every = [number for row in tokens.values() for number in row]
    # To the largest: loads differ by orders, and many tokens are no fault.
    scale = Scale(low=0, high=max(every, default=0), show=lambda number: f"{number:,.0f} tokens")
    none = {(layer["layer"], expert) for layer in layers for expert in layer["unrouted"]}
    text = (
        f"{data['tokens']:,} tokens in {data['windows']:,} windows. Of "
        f"{calibration['experts'] * len(layers):,} experts, {unrouted:,} saw no token and have "
        f"the statistics of their layer; {few:,} saw fewer than {prior}, and have more of their "
        "layer's than of their own."
    )
    return element(
        "section",
        element("h2", "Experts in calibration"),
        element("p", text),
        element(
            "figure",
            element("figcaption", "Tokens that each expert saw"),
            heat_map("Tokens by layer and expert", tokens, scale, marked=none),
            color_key(scale, every, marked="no token" if none else None),
        ),
        element("details", element("summary", "By layer"), _table(calibration)),
    )


def _table(calibration: Mapping[str, Any]) -> Markup:
    rows = [
        (
            str(layer["layer"]),
            str(min(layer["tokens"])),
            f"{median(layer['tokens']):.0f}",
            str(max(layer["tokens"])),
            number(layer["hidden_amax"], 4),
            number(layer["intermediate_amax"], 4),
            ranges(layer["unrouted"]),
            ranges(layer["mostly_pooled"]),
        )
        for layer in calibration["layers"]
    ]
    columns = [
        "layer", ">fewest", ">median", ">most", ">hidden amax", ">down amax", "without tokens",
        "mostly the layer's",
    ]  # fmt: skip
    return table(columns, rows, caption="Tokens and largest magnitudes of each layer")
