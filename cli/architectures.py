"""The architecture table as text, JSON and Markdown."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moequant.cli.output import Output
    from moequant.models import Architecture

_LAYER = "model.layers.{layer}."
_COMMON_KEPT = ("router", "router_bias", "expert_bias", "norm", "embedding", "lm_head", "other")
"""Roles that every architecture keeps unconverted; the table does not list them."""


def describe_architectures() -> list[dict[str, Any]]:
    """One row for each group of model_types of an architecture that are tested the same way."""
    from moequant.models import architectures

    return [row for architecture in architectures() for row in _rows(architecture)]


def _rows(architecture: Architecture) -> Iterator[dict[str, Any]]:
    from moequant.conversion.output_dialect import choose_dialect
    from moequant.formats import CONVERTIBLE
    from moequant.models import CONVERTIBLE_ROLES

    unlisted = (*CONVERTIBLE_ROLES, *_COMMON_KEPT)
    by_hand = architecture.tested.get("by_hand", {})
    not_loaded = architecture.tested.get("not_loaded", {})

    def group(model_type: str) -> tuple[bool, bool]:
        return model_type not in by_hand, model_type not in not_loaded

    # sorted() is stable: model_types of one group keep their order.
    ordered = sorted(architecture.model_types, key=group, reverse=True)
    for (by_class, loaded), model_types in groupby(ordered, key=group):
        listed = list(model_types)
        yield {
            "name": architecture.name,
            "model_types": listed,
            "experts": list(architecture.names),
            "layout": _layout(architecture),
            "gated": architecture.gated,
            "dialects": {f: choose_dialect(None, [f], architecture).name for f in CONVERTIBLE},
            "kept": [role for role in architecture.roles if role not in unlisted],
            "tested": "class" if by_class else "by hand",
            "notes": {t: by_hand[t] for t in listed if t in by_hand},
            "transformers_loads": loaded,
            "not_loaded": {t: not_loaded[t] for t in listed if t in not_loaded},
        }


def _layout(architecture: Architecture) -> str:
    """How a plain checkpoint stores the experts of a layer, in words."""
    stacked = architecture.stacked
    if stacked is None:
        words = ["separate"]
    else:
        transposed = [stack for stack in stacked.tensors if stacked.transposed(stack)]
        words = ["stacked, flat" if stacked.flat else "stacked"]
        if "gate" in stacked.tensors:
            words.append("gate and up separate")
        if len(transposed) == len(stacked.tensors):
            words.append("transposed")
        elif transposed:
            words.append(f"{' and '.join(transposed)} transposed")
        if stacked.interleaved:
            words.append("gate and up interleaved")
        if stacked.biased:
            words.append("biases")
    return ", ".join(words if architecture.gated else [*words, "no gate"])


def show_architectures(out: Output, document: Mapping[str, Any]) -> None:
    """Print the rows as a table."""
    formats = document["formats"]
    out.table(
        ["model_type", "experts on disk", "storage", *formats, "tested against"],
        [
            (
                ", ".join(row["model_types"]),
                _short(row["experts"]),
                row["layout"],
                *(row["dialects"][format] for format in formats),
                row["tested"],
            )
            for row in document["architectures"]
        ],
    )


def markdown(document: Mapping[str, Any]) -> str:
    """The documentation's three tables: architectures, tests by hand, models not loaded."""
    from moequant.dialects import default_dialect

    formats: Sequence[str] = document["formats"]
    usual = {format: default_dialect(format) for format in formats}
    lines = _table(
        ["`model_type`", "experts on disk", "storage"]
        + [f"`{format}`" for format in formats]
        + ["also kept", "transformers", "tested against"],
        [
            [
                ", ".join(f"`{t}`" for t in row["model_types"]),
                f"`{_short(row['experts'])}`",
                row["layout"],
                *(
                    "yes" if row["dialects"][f] == usual[f] else f"`{row['dialects'][f]}`"
                    for f in formats
                ),
                ", ".join(role.replace("_", " ") for role in row["kept"]),
                "loads" if row["transformers_loads"] else "no",
                row["tested"],
            ]
            for row in document["architectures"]
        ],
    )
    by_hand = [
        [f"`{model_type}`", row["tested"], note]
        for row in document["architectures"]
        for model_type, note in row["notes"].items()
    ]
    reasons: dict[str, list[str]] = {}
    for row in document["architectures"]:
        for model_type, reason in row["not_loaded"].items():
            reasons.setdefault(reason, []).append(f"`{model_type}`")
    not_loaded = [[", ".join(types), reason] for reason, types in reasons.items()]
    lines += ["", *_table(["`model_type`", "", "the test"], by_hand)]
    return "\n".join([*lines, "", *_table(["`model_type`", "transformers 5.24"], not_loaded)])


def _short(names: Sequence[str]) -> str:
    """The first of the names, without the prefix and suffix that nearly all have."""
    name = names[0].removesuffix(".weight")
    return name.removeprefix(_LAYER).replace("{expert}", "{e}").replace("{layer}", "{l}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return head + [f"| {' | '.join(row)} |" for row in rows]
