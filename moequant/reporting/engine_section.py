"""Which engines load a checkpoint, on which GPUs, by which kernels, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.compatibility import least_ranks
from moequant.reporting.markup import Markup, code, element, join, shortened, table
from moequant.reporting.words import NONE
from moequant.units import count, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_LOADS = {True: ("✓ yes", "good"), False: ("✗ no", "bad"), None: ("? not known", "unsure")}
_KNOWN = {"tested": "a test", "read": "its sources", "seen": "a try", None: NONE}
_NAMES_SHOWN = 3


def engine_section(output: Mapping[str, Any]) -> Markup:
    """A table of engines, one of GPUs, reasons and defects; empty if it could not be judged."""
    found = output["compatibility"]
    if found is None:
        return Markup("")
    rows = [
        (
            f"{engine['engine']} {engine['version']}",
            _loads(engine["loads"]),
            _KNOWN[engine["known"]],
            _ranks(engine["tp"]),
            _ranks(engine["tp_with_ep"]),
        )
        for engine in found["engines"]
    ]
    columns = ["engine", "loads it", "known from", "tp", "tp = ep"]
    return element(
        "section",
        element("h2", "Engines and GPUs"),
        element(
            "p",
            "By the rules of ",
            code("moequant check"),
            f", and the scales of {len(found['scales_read_in_layers'])} of "
            f"{count(len(found['expert_layers']), 'layer')}; no engine was run.",
        ),
        table(columns, rows, caption="Engines, and numbers of ranks at which they load it"),
        _gpus(found["engines"]),
        _memory(found["engines"]),
        _reasons(found["engines"]),
        _defects(found["defects"]),
    )


def _loads(loads: bool | None) -> Markup:
    word, kind = _LOADS[loads]
    return element("b", word, class_=kind)


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or NONE


def _gpus(engines: Sequence[Mapping[str, Any]]) -> Markup:
    """A row for the GPUs on which every engine does the same, a column an engine: the kernel."""
    ways: dict[tuple[int, ...], list[str]] = {}
    names: dict[tuple[int, ...], Sequence[str]] = {}
    for engine in engines:
        for gpu in engine["gpus"]:
            capability = tuple(gpu["capability"])
            names[capability] = gpu["names"]
            ways.setdefault(capability, []).append(_way(gpu))
    alike: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for capability in sorted(ways):
        alike.setdefault(tuple(ways[capability]), []).append(capability)
    rows = [
        (
            ", ".join(name for one in capabilities for name in names[one]),
            ", ".join(".".join(map(str, one)) for one in capabilities),
            *way,
        )
        for way, capabilities in alike.items()
    ]
    columns = ["GPUs", "compute capability", *(engine["engine"] for engine in engines)]
    return table(columns, rows, caption="Kernels of the experts on each GPU")


def _way(gpu: Mapping[str, Any]) -> str:
    if gpu["loads"] is not True:
        return _loads(gpu["loads"])
    kernels: dict[str, str] = gpu["kernels"]
    if len(kernels) == 1:
        way = next(iter(kernels.values()))
    else:
        way = "; ".join(f"{format}: {kernel}" for format, kernel in kernels.items()) or "✓ yes"
    return f"{way}; started with {' '.join(gpu['options'])}" if gpu["options"] else way


def _memory(engines: Sequence[Mapping[str, Any]]) -> Markup:
    """By how many ranks the weights fit into each GPU; empty where no engine's memory is known."""
    known = [engine for engine in engines if engine["memory"] is not None]
    alike: dict[tuple[str, ...], list[str]] = {}
    for gpu in known[0]["fits_from"] if known else ():
        cells = tuple(least_ranks(engine["fits_from"][gpu]) or "at none" for engine in known)
        alike.setdefault(cells, []).append(gpu)
    if not alike:
        return Markup("")
    columns = ["GPUs", *(f"{e['engine']}, {size(e['memory']['weight_bytes'])}" for e in known)]
    rows = [(", ".join(gpus), *cells) for cells, gpus in alike.items()]
    return table(columns, rows, caption="Least numbers of ranks at which the weights fit")


def _reasons(engines: Iterable[Mapping[str, Any]]) -> Markup:
    entries = [
        element(
            "li",
            element("b", f"{engine['engine']}, {kind}: "),
            said["text"],
            f" {said['next']}" if said["next"] else "",
            element("small", f" [{said['rule']}]"),
        )
        for engine in engines
        for kind, key in (("why not", "why"), ("note", "cautions"))
        for said in engine[key]
    ]
    return element("ul", entries) if entries else Markup("")


def _defects(defects: Iterable[Mapping[str, Any]]) -> Markup:
    entries = [element("li", _defect(defect)) for defect in defects]
    if not entries:
        return Markup("")
    return join(element("h3", "Defects in headers and scales"), element("ul", entries))


def _defect(defect: Mapping[str, Any]) -> Iterator[str]:
    yield element("b", f"{defect['id']}: ")
    if defect["detail"]:
        yield f"{shortened(defect['detail'])}; "
    for name in defect["names"][:_NAMES_SHOWN]:
        yield code(name)
        yield " "
    left = len(defect["names"]) - _NAMES_SHOWN
    yield f"and {left} more" if left > 0 else ""
