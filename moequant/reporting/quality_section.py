"""What evaluations found: perplexity, KL divergence, same top token, noise floor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.reporting.charts import value_bars
from moequant.reporting.markup import Markup, element, join, table
from moequant.reporting.words import NONE, number, percent, seconds, with_error
from moequant.units import size

if TYPE_CHECKING:
    from collections.abc import Mapping

_COLUMNS = (
    "model", "computed as", ">perplexity", ">KL mean", ">median", ">99 %", ">99.9 %",
    ">same top token",
)  # fmt: skip


def quality_section(document: Mapping[str, Any]) -> Markup:
    """A chart and a table of each evaluation."""
    heading = element("h2", "Quality of predictions")
    return element("section", heading, map(_evaluation, document["evaluations"]))


def _evaluation(evaluation: Mapping[str, Any]) -> Markup:
    data, floor, tests = evaluation["data"], evaluation["noise_floor"], evaluation["tests"]
    text = (
        f"{evaluation['kl']}. {data['windows']} windows of {data['window_tokens']} tokens; "
        f"standard errors are over windows. {seconds(evaluation['seconds'])}, at most "
        f"{size(evaluation['peak_bytes'])} planned. "
    )
    text += (
        "The noise floor is the reference in another dtype: differences below it say nothing."
        if floor
        else "The noise floor was not measured."
    )
    bars = [(test["name"], test["kl_mean"], test["kl_mean_se"]) for test in tests]
    title = "Mean KL divergence from the reference, with standard errors"
    mean = floor and floor["kl_mean"]
    chart = value_bars(title, bars, mean, picture="kl-divergence") if bars else ""
    return join(element("p", text), chart, _table(evaluation))


def _table(evaluation: Mapping[str, Any]) -> Markup:
    tests, floor = evaluation["tests"], evaluation["noise_floor"]
    every = [*tests, floor] if floor else tests
    rows: list[tuple[str, ...]] = []
    if every:
        before = number(every[0]["perplexity_reference"], 5)
        rows.append((f"{evaluation['reference']} (reference)", NONE, before, *[NONE] * 5))
    rows += [
        (
            test["name"],
            ", ".join(test["backends"]) or f"{test['run_as']}, {test['dtype']}",
            number(test["perplexity"], 5),
            with_error(test["kl_mean"], test["kl_mean_se"]),
            number(test["kl_median"]),
            number(test["kl_99"]),
            number(test["kl_999"]),
            percent(test["same_top"]),
        )
        for test in every
    ]
    return table(_COLUMNS, rows, caption="Figures of an evaluation")
