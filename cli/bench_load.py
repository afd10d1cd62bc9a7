"""moequant bench load CONVERTED."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.failures import FailedResult
from moequant.cli.output import NEVER_RUN, Output, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moequant.runtime.activations import ActivationsChoice


@click.command(
    "load",
    short_help="Time loading experts, beside a plain read.",
    epilog=options.examples(
        "moequant bench load qwen3-nvfp4",
    ),
)
@click.argument("converted", type=options.DIRECTORY)
@click.option(
    "--device", default="cuda", show_default=True, metavar="DEVICE", help="Where experts are put."
)
@options.activations_option
@options.rounds_option("Number of rounds; medians are reported.")
@options.json_option
def command(
    converted: str, device: str, activations: ActivationsChoice, rounds: int, as_json: bool
) -> None:
    """Time loading the experts of CONVERTED, and of every prepared folder in it.

    Beside it stands a plain read of the same bytes to the device. Files come from the page cache. A
    prepared folder that cannot be loaded is named with its reason, and the exit code is 1.
    """
    from moequant.benchmarks.loading import bench_loading
    from moequant.errors import MoequantError

    out = Output(as_json=as_json)
    with out.progress() as progress:
        document = bench_loading(
            converted,
            device=device,
            activations=activations,
            rounds=rounds,
            progress=progress,
        )
    untimed = [_name(row) for row in document["folders"] if "error" in row]
    if not (as_json and untimed):
        out.result(document, _show)
    if untimed:
        raise FailedResult(MoequantError(f"not timed: {', '.join(untimed)}"), document)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    out.line(", ".join(f"{name} {text}" for name, text in document["machine"].items()))
    out.line(
        f"{document['checkpoint']}: {document['layers']} layers, medians of {document['rounds']}"
    )
    out.line()
    timed = [row for row in document["folders"] if "error" not in row]
    out.table(
        [
            "experts",
            "activations",
            "layout",
            ">bytes",
            ">s",
            ">GB/s",
            ">plain s",
            ">GB/s",
            ">threads",
            ">share",
        ],
        [list(_row(row)) for row in timed],
    )
    for row in document["folders"]:
        if "error" in row:
            out.line(f"{_name(row)} was not timed: {row['error']}")


def _name(row: Mapping[str, Any]) -> str:
    target = row["prepared_for"]
    mark = f" ({NEVER_RUN})" if row.get("never_run") else ""
    return "as converted" if target is None else f"prepared for {target}{mark}"


def _row(row: Mapping[str, Any]) -> Iterator[str]:
    yield _name(row)
    yield ", ".join(row["activations"])
    yield ", ".join(row["layout"])
    yield size(row["bytes"])
    for seconds in (row["load_s"], row["plain_s"]):
        yield f"{seconds:.3f}"
        yield f"{row['bytes'] / seconds / 1e9:.2f}"
    yield str(row["plain_threads"])
    yield f"{row['share']:.0%}"
