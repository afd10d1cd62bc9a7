"""moequant formats: list formats, dialects and architectures, and what runs on this machine."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import NEVER_RUN, Output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moequant.formats import Format
    from moequant.runtime.backends import Backend

_SHAPE = (2048, 4096)
"""[N, K] of a weight for counting bits: large compared with every block, and whole blocks."""


@click.command(
    "formats",
    short_help="List formats, their options and dialects.",
    epilog=options.examples(
        "moequant formats",
        "moequant formats --backends",
        "moequant formats --backends --activations fp8_tensor",
        "moequant formats --architectures",
    ),
)
@click.option(
    "--backends",
    is_flag=True,
    help="List what converts and runs each format on this machine instead, or why not.",
)
@click.option(
    "--architectures",
    is_flag=True,
    help="List the architectures instead, with the dialect of each format and how each is tested.",
)
@options.activations_option
@click.option("--markdown", is_flag=True, help="With --architectures: print Markdown tables.")
@options.json_option
def command(
    backends: bool, architectures: bool, activations: str, markdown: bool, as_json: bool
) -> None:
    """List formats with their options, and dialects. With --json, backends are listed, too.

    Backends are asked with the activations of the format, or others that they are for, or with
    those of --activations.
    """
    if markdown and (as_json or not architectures):
        raise click.UsageError("--markdown needs --architectures and excludes --json")
    if backends and architectures:
        raise click.UsageError("give --backends or --architectures, not both")
    if activations != "format" and not (backends or (as_json and not architectures)):
        raise click.UsageError("--activations needs --backends or --json")
    from moequant.cli import architectures as table
    from moequant.dialects import REGISTRY as DIALECTS
    from moequant.formats import CONVERTIBLE as FORMATS

    out = Output(as_json=as_json)
    if architectures:
        found = {"formats": list(FORMATS), "architectures": table.describe_architectures()}
        if markdown:
            out.line(table.markdown(found))
        else:
            out.result(found, table.show_architectures)
        return
    document: dict[str, Any] = {}
    if as_json or not backends:
        document["formats"] = [_describe(format) for format in FORMATS.values()]
        document["dialects"] = [
            {"name": d.name, "summary": d.summary, "formats": list(d.carried)}
            for d in DIALECTS.values()
        ]
    if as_json or backends:
        document["quantizers"] = list(_quantizers())
        document["backends"] = list(_backends(activations))
    out.result(document, _show_backends if backends else _show)


def _describe(format: Format) -> dict[str, Any]:
    from moequant.conversion.rounding import options_of_format
    from moequant.dialects import default_dialect
    from moequant.formats.base import WHOLE
    from moequant.preparation.layers import backends_for
    from moequant.runtime.backends import TARGETS

    bits = 8 * sum(spec.size_bytes for spec in format.specs(_SHAPE).values())
    return {
        "name": format.name,
        "summary": format.summary,
        "block": [None if extent == WHOLE else extent for extent in format.block],
        "bits_per_weight": round(bits / math.prod(_SHAPE), 3),
        "activations": format.activations,
        "default_dialect": default_dialect(format.name),
        "targets": [target for target in TARGETS if backends_for(format.name, target)],
        "options": {
            name: {"default": values[0], "values": list(values)}
            for name, values in options_of_format(format.name).items()
        },
    }


def _quantizers() -> Iterator[dict[str, Any]]:
    """Whether each quantizer runs here, or why not. Every quantizer supports every format."""
    from moequant.quantizers import NativeQuantizer, Quantizer, choose_quantizer

    chosen = choose_quantizer()
    for quantizer in (NativeQuantizer, Quantizer):
        by_default = quantizer is type(chosen.quantizer)
        yield {
            "quantizer": quantizer.name,
            "summary": quantizer.summary,
            "runs": by_default or quantizer is Quantizer,
            "by_default": by_default,
            "reason": chosen.reason if quantizer is NativeQuantizer else None,
        }


def _backends(asked: str) -> Iterator[dict[str, Any]]:
    """Whether each backend runs layers of Qwen3-30B-A3B's sizes on each device here, or why not.

    Activations are those of the format, or the others that the backend is for, or those `asked`.
    """
    import torch

    from moequant.formats import CONVERTIBLE
    from moequant.runtime.backends import Workload, backends
    from moequant.runtime.select import why_not

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device, backend, format in product(devices, backends().values(), CONVERTIBLE.values()):
        workload = Workload(
            format=format.name,
            activations=_activations(backend, format) if asked == "format" else asked,
            experts=128,
            hidden=2048,
            intermediate=768,
            device=torch.device(device),
        )
        reason = why_not(backend, workload)
        multiples = backend.multiples_with(workload.activations)
        yield {
            "device": device,
            "backend": backend.name,
            "format": format.name,
            "activations": workload.activations,
            "hidden_multiple": multiples[0],
            "intermediate_multiple": multiples[1],
            "runs": reason is None,
            "by_default": reason is None and device in backend.default_on,
            "reason": reason,
            "has_kernels": backend.formats is None or format.name in backend.formats,
            "never_run": backend.never_run and _is_for(backend, format, workload.activations),
        }


def _activations(backend: Backend, format: Format) -> str:
    """The scheme of the format, unless the backend serves the format only with another."""
    from moequant.runtime.activations import SCHEMES

    served = [scheme for scheme in SCHEMES if _is_for(backend, format, scheme)]
    own = format.activations
    return own if own in served or not served else served[0]


def _is_for(backend: Backend, format: Format, scheme: str) -> bool:
    """Whether it has kernels for a format with a scheme of activations, on some target."""
    from moequant.runtime.backends import TARGETS

    return any(format.name in backend.serves(target, scheme) for target in TARGETS)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    formats = document["formats"]
    out.table(
        ["format", ">bits", "dialect", "what it is"],
        [
            (f["name"], f"{f['bits_per_weight']:g}", f["default_dialect"], f["summary"])
            for f in formats
        ],
    )
    # Formats whose option has the same values share a row.
    having: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for f in formats:
        for name, option in f["options"].items():
            having[name, *option["values"]].append(f["name"])
    out.line()
    out.table(
        ["option", "default", "or", "of"],
        [
            (name, default, ", ".join(others), ", ".join(names))
            for (name, default, *others), names in sorted(having.items())
        ],
    )
    out.line()
    out.table(
        ["dialect", "formats", "what it is"],
        [(d["name"], ", ".join(d["formats"]), d["summary"]) for d in document["dialects"]],
    )
    out.line()
    out.line("What runs here: moequant formats --backends")
    out.line("Which models: moequant formats --architectures")


def _show_backends(out: Output, document: Mapping[str, Any]) -> None:
    out.table(
        ["quantizer", "converts", "how"],
        [(q["quantizer"], _verdict(q), q["summary"]) for q in document["quantizers"]],
    )
    # A row for the formats of which a backend says the same.
    alike: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for b in document["backends"]:
        if not b["has_kernels"]:
            continue
        multiples = _multiples(b["hidden_multiple"], b["intermediate_multiple"])
        verdict = _verdict(b) + f"; {NEVER_RUN}" * b["never_run"]
        said = (b["backend"], b["activations"], multiples, verdict)
        alike[b["device"]][said].append(b["format"])
    for device, rows in alike.items():
        out.line()
        out.line(f"On {device}:")
        out.line()
        out.table(
            ["backend", "formats", "activations", ">H, I multiples of", "runs"],
            [(row[0], ", ".join(formats), *row[1:]) for row, formats in rows.items()],
        )


def _multiples(hidden: int, intermediate: int) -> str:
    """Empty where a backend runs all sizes of a format."""
    return f"{hidden}, {intermediate}" if (hidden, intermediate) != (1, 1) else ""


def _verdict(row: Mapping[str, Any]) -> str:
    if not row["runs"]:
        return f"no: {row['reason']}"
    return "by default" if row["by_default"] else "when named"
