"""The page: a report's document as one HTML file that needs nothing else.

No JavaScript, no fonts, no request: a content security policy forbids all but the style and the
pictures in it. It has colors for light, dark and print.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from moequant.reporting.calibration_section import calibration_section
from moequant.reporting.code_section import code_section
from moequant.reporting.engine_section import engine_section
from moequant.reporting.error_section import error_section
from moequant.reporting.glance import comparison, tiles, verdict
from moequant.reporting.markup import Markup, element, join
from moequant.reporting.origin_section import origin_section
from moequant.reporting.quality_section import quality_section
from moequant.reporting.size_section import size_section
from moequant.reporting.words import seconds
from moequant.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_page(document: Mapping[str, Any]) -> str:
    """The HTML of a report's document, as `make_report` gives it."""
    outputs = document["outputs"]
    title = f"Quantization report: {', '.join(output['name'] for output in outputs)}"
    style = resources.files("moequant.reporting").joinpath("style.css").read_text("utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
        element("style", Markup(style)),
    )
    body = element("body", element("main", _body(document)), _footer(document))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _body(document: Mapping[str, Any]) -> Iterator[Markup]:
    outputs = document["outputs"]
    several = len(outputs) > 1
    yield element("h1", "Quantization report")
    for output in outputs:
        yield verdict(output, document)
    if several:
        yield comparison(document)
    else:
        yield tiles(outputs[0], document)
    if document["evaluations"]:
        yield quality_section(document)
    for index, output in enumerate(outputs):
        sections = join(
            size_section(output),
            error_section(output),
            code_section(output),
            engine_section(output),
            origin_section(output),
        )
        if several:
            heading = element("h2", output["name"], class_="output", id=f"output-{index}")
            sections = element("article", heading, sections, aria_labelledby=f"output-{index}")
        yield sections
    if document["calibration"] is not None:
        yield calibration_section(document["calibration"])
    yield from _gaps(document, several=several)


def _gaps(document: Mapping[str, Any], *, several: bool) -> Iterator[Markup]:
    if not document["not_measured"]:
        return
    entries = [
        element(
            "li",
            element("b", f"{gap['of']}: ") if several else "",
            gap["what"],
            join(" To measure it: ", element("code", gap["how"], class_="command"))
            if gap["how"]
            else "",
        )
        for gap in document["not_measured"]
    ]
    yield element("section", element("h2", "Not measured"), element("ul", entries))


def _footer(document: Mapping[str, Any]) -> Markup:
    made = document["made"]
    return element(
        "footer",
        f"By moequant {document['moequant']}, {made['at']}, in {seconds(made['seconds'])}; the "
        f"process held at most {size(made['peak_bytes'])}.",
    )
