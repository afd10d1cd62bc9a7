"""What a person wants to know first: the verdict, and one figure of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.reporting.markup import Markup, code, element, join, shortened, table
from moequant.reporting.size_section import all_sizes, total_sizes
from moequant.reporting.words import NONE, listed, number, percent, with_error
from moequant.units import count, size

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN_PROBLEMS = 10
_STATES = {
    "faulty": ("✗", "bad"),
    "verified": ("✓", "good"),
    "verified_earlier": ("?", "unsure"),
    "unchanged": ("?", "unsure"),
    "unchecked": ("?", "unsure"),
}


def verdict(output: Mapping[str, Any], document: Mapping[str, Any]) -> Markup:
    """The verdict of one checkpoint, with its problems."""
    sign, kind = _STATES[output["verdict"]]
    problems = output["problems"]
    content = [
        element(
            "p",
            element("span", sign, class_="sign", aria_hidden="true"),
            element("b", f"{output['name']}: "),
            _sentence(output, document),
            class_="verdict",
        )
    ]
    if problems:
        shown = (
            element("li", code(one["name"]), f": {shortened(one['message'])}")
            for one in problems[:_SHOWN_PROBLEMS]
        )
        content.append(element("ul", shown))
        left = output["problem_count"] - len(problems[:_SHOWN_PROBLEMS])
        if left:
            content.append(element("p", f"and {left} more, in the document of --json."))
    return element("section", content, class_=f"banner {kind}")


def _sentence(output: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    verification = output["verification"]
    source = document["source"] or (verification or {}).get("source")
    if output["verdict"] == "faulty":
        against = f"against {source}" if verification else "against its moequant.json"
        return f"{count(output['problem_count'], 'problem')} {against}."
    if output["verdict"] == "unchanged":
        return "its files are those that were written. It was not compared with its source."
    if verification is None:
        return "not checked. It has no moequant.json, and no source was given."
    found = {
        "bytes": f"verified: every byte is what the recorded recipe gives from {source}.",
        "bounds": f"every weight is within the bounds of its format, compared with {source}. "
        "Bytes were not compared, because no usable moequant.json says how they were made.",
        None: f"compared with {source}; no weights were.",
    }[verification["method"]]
    if output["verdict"] == "verified_earlier":
        return f"{found} That was earlier; whether the files changed since is not known."
    if output["verified_earlier"]:
        return f"{found} That was earlier; the files are unchanged since."
    return found


def tiles(output: Mapping[str, Any], document: Mapping[str, Any]) -> Markup:
    """The figures of one checkpoint."""
    entries = (
        element("div", element("dt", label), element("dd", value), class_="tile")
        for label, value in figures(output, document).items()
        if value != NONE
    )
    return element("dl", entries, class_="tiles")


def comparison(document: Mapping[str, Any]) -> Markup:
    """The figures of several checkpoints side by side."""
    outputs = document["outputs"]
    found = [figures(output, document) for output in outputs]
    rows = [
        [label, *(own[label] for own in found)]
        for label in found[0]
        if any(own[label] != NONE for own in found)
    ]
    columns = [
        element("a", output["name"], href=f"#output-{index}")
        for index, output in enumerate(outputs)
    ]
    shown = table(["", *columns], rows, caption="Figures of each output", class_="comparison")
    return element("section", element("h2", "Side by side"), shown, all_sizes(outputs))


def figures(output: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, str]:
    """One figure of each kind, by label; a dash for what was not measured."""
    return {
        "Format": _formats(output),
        "Bytes": _bytes(output),
        "Error of weights": _error(output),
        "Error of layers": _layer_error(output),
        **_quality(output, document),
        "Loads in": _engines(output, loads=True),
        "Does not load in": _engines(output, loads=False),
    }


def _formats(output: Mapping[str, Any]) -> str:
    found = output["compatibility"]
    if found is None:
        return NONE
    if not found["formats"]:
        return "not quantized"
    return f"{', '.join(found['formats'])}, as {found['dialect']}"


def _bytes(output: Mapping[str, Any]) -> str | Markup:
    before, after = total_sizes(output)
    if after is None:
        return NONE
    if not before:
        return size(after)
    return join(f"{size(after)} of {size(before)} ", element("small", percent(after / before)))


def _error(output: Mapping[str, Any]) -> str | Markup:
    verification = output["verification"]
    if not verification or not verification["formats"]:
        return NONE
    several = len(verification["formats"]) > 1
    totals = [
        f"{percent(total['relative_error'])}{' ' + total['format'] if several else ''}"
        for total in verification["formats"]
    ]
    worst = verification["worst_weights"][:1]
    note = f" worst {percent(worst[0]['relative_error'])}" if worst else ""
    return join(", ".join(totals), element("small", note))


def _layer_error(output: Mapping[str, Any]) -> str | Markup:
    layers = (output["verification"] or {}).get("layers", [])
    known = [layer["layer_error"] for layer in layers if layer["layer_error"] is not None]
    if not known:
        return NONE
    quantized = [layer["quantized_activations_error"] for layer in layers]
    if None in quantized:
        return percent(max(known))
    note = element("small", f" {percent(max(quantized))} with its activations")
    return join(percent(max(known)), note)


def _quality(output: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, str]:
    labels = ("KL divergence", "Same top token", "Perplexity")
    if output["evaluated_as"] is None:
        return dict.fromkeys(labels, NONE)
    place, index = output["evaluated_as"]
    evaluation = document["evaluations"][place]
    test, floor = evaluation["tests"][index], evaluation["noise_floor"]
    note = f" noise floor {number(floor['kl_mean'])}" if floor else " noise floor not measured"
    kl = join(with_error(test["kl_mean"], test["kl_mean_se"]), element("small", note))
    before = f" {number(test['perplexity_reference'], 4)} before"
    perplexity = join(number(test["perplexity"], 4), element("small", before))
    return dict(zip(labels, (kl, percent(test["same_top"]), perplexity), strict=True))


def _engines(output: Mapping[str, Any], *, loads: bool) -> str:
    found = output["compatibility"]
    if found is None:
        return NONE
    names = [engine["engine"] for engine in found["engines"] if engine["loads"] is loads]
    return listed(names) or ("none known" if loads else NONE)
