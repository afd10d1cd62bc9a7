"""Errors of weights: by format, by layer and expert, and the worst ones."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from moequant.reporting.heat_map import Scale, color_key, heat_map
from moequant.reporting.markup import Markup, code, element, join, shortened, table
from moequant.reporting.words import NONE, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    Rows = dict[int, list[float | None]]

_WORST = 12
_ROUTED = "routed_experts"
_MAPS = {"gate and up": ("gate", "up"), "down": ("down",)}


def error_section(output: Mapping[str, Any]) -> Markup:
    """Tables and heat maps; empty if no weights were compared."""
    verification = output["verification"]
    if not verification or not verification["formats"]:
        return Markup("")
    return element(
        "section",
        element("h2", "Error of weights"),
        element(
            "p",
            "||w - dequantize(q)|| / ||w||, measured on the bytes on disk against the source.",
        ),
        _by_format(verification["formats"]),
        _maps(output),
        _worst(output),
        _details("By layer and role", _by_layer(verification["errors"])),
        _layers(verification["layers"]),
        _requantized(verification["requantization_errors"]),
    )


def _by_format(totals: Iterable[Mapping[str, Any]]) -> Markup:
    totals = list(totals)
    effective = any(total["effective_relative_error"] is not None for total in totals)
    lost = any(total["lost_db"] is not None for total in totals)
    columns = ["format", ">weights", ">error stored" if effective else ">error", ">SQNR"]
    columns += [">error effective in vLLM"] if effective else []
    columns += [">SQNR lost against moequant's quantizer"] if lost else []
    rows = []
    for total in totals:
        row = [
            total["format"],
            str(total["weights"]),
            percent(total["relative_error"]),
            _decibel(total["sqnr_db"]),
        ]
        row += [percent(total["effective_relative_error"])] if effective else []
        row += [_decibel(total["lost_db"])] if lost else []
        rows.append(row)
    note = (
        element(
            "p",
            "Effective: vLLM folds the scales of a row into 8-bit ones and one for the row, and "
            "multiplies by that weight.",
        )
        if effective
        else ""
    )
    return join(table(columns, rows, caption="All weights of a format together"), note)


def _maps(output: Mapping[str, Any]) -> Markup:
    groups, faulty = output["verification"]["errors"], output["faulty_weights"] or []
    rows = {name: _rows(groups, projections) for name, projections in _MAPS.items()}
    rows = {name: own for name, own in rows.items() if own}
    if not rows:
        return Markup("")
    values = [value for own in rows.values() for layer in own.values() for value in layer]
    scale = Scale.of(values, percent)
    figures = []
    for name, own in rows.items():
        marked = {(f["layer"], f["expert"]) for f in faulty if f["projection"] in _MAPS[name]}
        title = (
            f"Error of {name} in {output['name']} by layer and expert, from "
            f"{scale.show(scale.low)} (dark) to {scale.show(scale.high)} (bright)"
        )
        caption = f"{name[0].upper()}{name[1:]}"
        figures.append(
            element(
                "figure",
                element("figcaption", caption),
                heat_map(
                    title, own, scale, marked=marked, picture=f"errors-{name.replace(' ', '-')}"
                ),
            )
        )
    return element(
        "div",
        element("h3", "By layer and expert"),
        element("p", "Of gate and up, the larger error of the two. The table below has numbers."),
        figures,
        color_key(scale, values, marked="a problem names it" if faulty else None),
    )


def _rows(groups: Iterable[Mapping[str, Any]], projections: tuple[str, ...]) -> Rows:
    """By layer, the error of each expert: the largest of some projections."""
    found: Rows = {}
    for group in groups:
        if group["role"] != _ROUTED or group["projection"] not in projections:
            continue
        row = found.setdefault(group["layer"], [])
        row += [None] * (len(group["experts"]) - len(row))
        for expert, error in enumerate(group["experts"]):
            known = [value for value in (row[expert], error) if value is not None]
            row[expert] = max(known, default=None)
    return found


def _worst(output: Mapping[str, Any]) -> Markup:
    """The weights that problems name, then those of the largest error."""
    faults: list[list[str]] = [
        [
            code(problem["name"]),
            element("b", "problem", class_="bad"),
            NONE,
            NONE,
            shortened(problem["message"], 160),
        ]
        for problem in output["problems"]
        if problem["check"] == "weights"
    ]
    weights = output["verification"]["worst_weights"]
    effective = any(weight["effective_relative_error"] is not None for weight in weights)
    rows: list[list[str]] = [
        [
            code(weight["name"]),
            weight["format"],
            percent(weight["relative_error"]),
            _decibel(weight["sqnr_db"]),
            f"{percent(weight['effective_relative_error'])} effective" if effective else "",
        ]
        for weight in weights[:_WORST]
    ]
    columns = ["tensor", "format", ">error", ">SQNR", "note"]
    if not faults and not effective:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    caption = "Tensors that a problem names, then those of largest error"
    heading = element("h3", "Worst tensors")
    return join(heading, table(columns, [*faults[:_WORST], *rows], caption=caption))


def _by_layer(groups: Iterable[Mapping[str, Any]]) -> Markup:
    """A row a layer, a column a role and projection; of experts also the worst one."""
    cells: dict[int | None, dict[str, str]] = defaultdict(dict)
    columns: dict[str, None] = {}
    for group in groups:
        name = " ".join(filter(None, (group["role"], group["projection"], group["format"])))
        columns[name] = None
        cells[group["layer"]][name] = _cell(group)
    ordered = sorted(cells, key=lambda layer: (layer is None, layer))
    rows = [
        (
            "none" if layer is None else str(layer),
            *(cells[layer].get(name, NONE) for name in columns),
        )
        for layer in ordered
    ]
    return table(
        ["layer", *(f">{name}" for name in columns)],
        rows,
        caption="Error of each layer, and its worst expert",
    )


def _cell(group: Mapping[str, Any]) -> str:
    known = [(e, n) for n, e in enumerate(group["experts"]) if e is not None]
    if not known:
        return percent(group["relative_error"])
    error, expert = max(known)
    return f"{percent(group['relative_error'])}; expert {expert}: {percent(error)}"


def _layers(layers: Iterable[Mapping[str, Any]]) -> Markup:
    ran = [*layers]
    rows = [
        (
            str(layer["layer"]),
            layer["format"],
            f"{layer['experts']} experts, {layer['tokens']} tokens",
            percent(layer["layer_error"]),
            percent(layer["quantized_activations_error"]),
            f"{layer['backend']} on {layer['device']}",
        )
        for layer in ran
    ]
    if not rows:
        return Markup("")
    columns = ["layer", "format", "ran", ">error", ">with its activations", "computed by"]
    caption = "Error of a layer's output, on random inputs"
    shown = table(columns, rows, caption=caption)
    notes = [element("p", note) for layer in ran for note in _notes(layer)]
    return join(element("h3", "Layers that were run"), shown, *notes)


def _notes(layer: Mapping[str, Any]) -> Iterator[str]:
    """Why there is no error with the activations of a layer, or what one warns of."""
    if (why := layer.get("activations_not_measured")) is not None:
        yield f"Layer {layer['layer']} with its activations: not measured, because {why}."
    if (warning := layer.get("warning")) is not None:
        yield f"Warning: {warning}."


def _requantized(errors: Iterable[Mapping[str, Any]]) -> Markup:
    rows = [
        (
            error["role"],
            error["source"],
            error["format"],
            str(error["weights"]),
            str(error["exact"]),
            percent(error["relative_error"]),
        )
        for error in errors
    ]
    if not rows:
        return Markup("")
    columns = ["role", "from", "to", ">weights", ">exact", ">error"]
    caption = "Weights that the source had quantized already"
    return join(element("h3", "Quantized before"), table(columns, rows, caption=caption))


def _details(summary: str, content: Markup) -> Markup:
    return element("details", element("summary", summary), content)


def _decibel(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} dB"
