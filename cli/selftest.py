"""moequant selftest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.failures import FailedResult
from moequant.cli.output import NEVER_RUN, Output, count
from moequant.errors import NumericsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping


@click.command(
    "selftest",
    short_help="Check the numbers of every backend on this device.",
    epilog=options.examples(
        "moequant selftest",
        "moequant selftest --device cpu --backend naive_batched",
    ),
)
@click.option(
    "--device", default="cuda", show_default=True, metavar="DEVICE", help="Device to run on."
)
@options.backend_option("Backend to check; by default every one.")
@options.json_option
@options.quiet_option
def command(device: str, backend: str | None, as_json: bool, quiet: bool) -> None:
    """Run every backend that the device can run, and compare it with the CPU reference.

    Small layers of random experts, in every format and with every kind of activations. The exit
    code is 5 if a backend computes something else, and 4 if none can run; the reasons are printed.
    """
    from moequant.selftest import selftest

    out = Output(as_json=as_json, quiet=quiet)
    with out.progress() as progress:
        document = selftest(device, backend=backend, progress=progress)
    if document["ok"] or not as_json:
        out.result(document, _show)
    if not document["rows"]:
        raise FailedResult(UnsupportedError(_explain_nothing(document)), document)
    if not document["ok"]:
        raise FailedResult(NumericsError(_explain(document)), document)


def _explain_nothing(document: Mapping[str, Any]) -> str:
    names = ", ".join(_marked(document, name) for name in document["not_run"])
    return (
        f"nothing was checked, because {names} cannot run on {document['device']}; name another "
        "--backend or --device"
    )


def _marked(document: Mapping[str, Any], name: str) -> str:
    return f"{name} ({NEVER_RUN})" if name in document["never_run"] else name


def _explain(document: Mapping[str, Any]) -> str:
    failures = [
        f"{row['backend']}, {row['format']} x {row['activations']}: {failure}"
        for row in document["rows"]
        for failure in row["failures"]
    ]
    return "\n".join(
        [f"{count(len(failures), 'failure')}; open an issue with this output", *failures]
    )


def _show(out: Output, document: Mapping[str, Any]) -> None:
    names = [
        f"{name} {document[name]}" for name in ("moequant", "torch", "triton") if document[name]
    ]
    gpu = document["gpu"]
    place = f"{gpu}, compute capability {document['compute_capability']}" if gpu else "CPU"
    out.line(f"{place}; {', '.join(names)}")
    out.line()
    if document["rows"]:
        _show_rows(out, document)
    for name, reasons in document["not_run"].items():
        out.line(f"not run: {_marked(document, name)}: {reasons}")
    out.line(f"{sum(row['calls'] for row in document['rows'])} calls, {document['seconds']} s")


def _show_rows(out: Output, document: Mapping[str, Any]) -> None:
    out.table(
        ["backend", "weights", "activations", ">calls", ">error", ">limit", "result"],
        [
            [
                row["backend"],
                row["format"],
                row["activations"],
                row["calls"],
                f"{row['error']:.1e}",
                f"{row['limit']:.1e}",
                "FAILED" if row["failures"] else "passed",
            ]
            for row in document["rows"]
        ],
    )
    skipped = {
        (row["backend"], kind, reason): None
        for row in document["rows"]
        for kind, reason in row["skipped"].items()
    }
    for name, kind, reason in skipped:
        out.line(f"not run: {name}, layers with {kind}: {reason}")
