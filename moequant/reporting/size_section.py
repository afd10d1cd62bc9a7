"""Bytes before and after, by role."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from moequant.reporting.charts import legend, stacked_bars
from moequant.reporting.markup import Markup, element, join, table
from moequant.reporting.words import NONE, percent
from moequant.units import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def size_section(output: Mapping[str, Any]) -> Markup:
    """Bars and a table; empty if the headers could not be read."""
    if output["after"] is None:
        return Markup("")
    after = _by_role(output["after"])
    before = None if output["before"] is None else _by_role(output["before"])
    roles = [role for role, _ in (before or after).most_common()]
    roles += [role for role in after if role not in roles]
    bars = {"before": before} if before is not None else {}
    bars |= {"after": after}
    return element(
        "section",
        element("h2", "Bytes by role"),
        _sentence(output),
        _bars("Bytes of each role before and after", bars, roles),
        legend(roles),
        _table(roles, before, after, output["after"]),
    )


def all_sizes(outputs: Sequence[Mapping[str, Any]]) -> Markup:
    """A bar of the source, if its headers were read, and of each output; empty if none is known."""
    bars = {
        output["name"]: _by_role(output["after"])
        for output in outputs
        if output["after"] is not None
    }
    if not bars:
        return Markup("")
    before = outputs[0]["before"]
    if before is not None:
        bars = {"source": _by_role(before), **bars}
    roles = [role for role, _ in next(iter(bars.values())).most_common()]
    roles += sorted({role for own in bars.values() for role in own} - {*roles})
    return join(_bars("Bytes of each output by role", bars, roles), legend(roles))


def _bars(title: str, bars: Mapping[str, Counter[str]], roles: Sequence[str]) -> Markup:
    ordered = {name: {role: own[role] for role in roles} for name, own in bars.items()}
    return stacked_bars(title, ordered, max(own.total() for own in bars.values()))


def total_sizes(output: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Bytes of all weights before, and after; None where they are not known."""
    totals = [
        None if groups is None else sum(group["bytes"] for group in groups)
        for groups in (output["before"], output["after"])
    ]
    if totals[0] is None and output["origin"] is not None:
        totals[0] = output["origin"]["source"]["bytes"]
    return totals[0], totals[1]


def _sentence(output: Mapping[str, Any]) -> Markup:
    before, after = total_sizes(output)
    assert after is not None
    if before:
        text = f"{size(before)} before, {size(after)} after: {percent(after / before)}."
    else:
        text = f"{size(after)}."
    if output["before"] is None:
        text += " The headers of the source were not read, so roles before are not known."
    return element("p", text)


def _by_role(groups: Iterable[Mapping[str, Any]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for group in groups:
        found[group["role"]] += group["bytes"]
    return found


def _table(
    roles: Iterable[str],
    before: Counter[str] | None,
    after: Counter[str],
    groups: Iterable[Mapping[str, Any]],
) -> Markup:
    formats: dict[str, list[str]] = {}
    for group in groups:
        formats.setdefault(group["role"], []).append(group["format"] or " ".join(group["dtypes"]))
    rows = [
        (
            role,
            ", ".join(formats.get(role, [])),
            NONE if before is None else size(before[role]),
            size(after[role]),
            percent(after[role] / before[role]) if before and before[role] else NONE,
        )
        for role in roles
    ]
    return table(
        ["role", "stored as", ">before", ">after", ">of before"], rows, caption="Bytes by role"
    )
