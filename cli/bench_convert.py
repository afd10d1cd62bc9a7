"""moequant bench convert [--format NAME] [--source-format NAME] [--size GB] [--against NAME]."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import Output, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_DEFAULT_GB = 1.26


def _check_size(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse NaN and infinity, which click's ranges accept."""
    if math.isfinite(value):
        return value
    raise click.BadParameter(f"{value} is not a finite number of GB", ctx, param)


@click.command(
    "convert",
    short_help="Time conversion on a CPU.",
    epilog=options.examples(
        "moequant bench convert --size 0.3 --format nvfp4",
    ),
)
@options.converted_format_option
@options.source_format_option
@click.option(
    "--size",
    "size_gb",
    metavar="GB",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULT_GB,
    show_default=True,
    callback=_check_size,
    help="Approximate size of the checkpoint to generate and convert.",
)
@click.option("--against", metavar="NAME", help="Also time llmcompressor, if it is installed.")
@options.workers_option
@options.rounds_option("Number of rounds; the best of each figure is reported.")
@options.folder_option("Folder to write to; its disk is what is timed.")
@options.json_option
def command(
    format: str | None,
    source_format: str | None,
    size_gb: float,
    against: str | None,
    workers: int | None,
    rounds: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Time the conversion of a generated checkpoint, and a plain read and write of as many bytes.

    The checkpoint has experts of Qwen3-30B-A3B's sizes. Each round converts it with one worker and
    with several, each in its own process, and then reads and writes as many bytes. With
    --source-format, the checkpoint is first quantized to that format, which is not timed.
    """
    from moequant.benchmarks.conversion import bench_conversion
    from moequant.conversion import DEFAULT_WORKERS
    from moequant.formats import CONVERTIBLE, WRITABLE

    every = CONVERTIBLE if source_format is None else WRITABLE
    document = bench_conversion(
        [*every] if format is None else [format],
        size_bytes=round(size_gb * 1e9),
        workers=workers or DEFAULT_WORKERS,
        rounds=rounds,
        against=[] if against is None else [against],
        source_format=source_format,
        folder=folder,
    )
    Output(as_json=as_json).result(document, _show)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    out.line(", ".join(f"{name} {value}" for name, value in document["machine"].items()))
    out.line(
        f"{size(document['input_bytes'])} of {document['source_format']} experts, "
        f"best of {document['rounds']}"
    )
    out.line()
    columns = ["format", "tool", ">workers", ">CPU s", ">beyond floor", ">GB/CPU s"]
    columns += [">s", ">x floor", ">GB/s", ">peak memory"]
    out.table(columns, list(_rows(document)))
    out.line()
    out.line("floor: plain read and write, on disk; beyond floor: without it and without SHA-256")
    for row in document["formats"]:
        ours = row["conversions"][0]
        out.line(
            f"{row['format']}: {ours['how']}, "
            f"{ours['weights_per_cpu_second'] / 1e9:.2f} G weights a CPU s; "
            f"SHA-256 {row['floor']['sha256_cpu_seconds']:.2f}, "
            f"imports {ours['import_cpu_seconds']:.2f}, "
            f"compilation {ours['prepare_cpu_seconds']:.2f} CPU s"
        )


def _rows(document: Mapping[str, Any]) -> Iterator[list[str]]:
    for row in document["formats"]:
        floor = row["floor"]
        read_gb = row["input_bytes"] / 1e9
        yield [
            row["format"],
            "floor",
            "1",
            f"{floor['cpu_seconds']:.2f}",
            "",
            f"{read_gb / floor['cpu_seconds']:.2f}",
            f"{floor['seconds']:.2f}",
            "1.00",
            f"{read_gb / floor['seconds']:.2f}",
            "",
        ]
        for found in row["conversions"]:
            yield [
                row["format"],
                found["tool"],
                str(found["workers"]),
                f"{found['cpu_seconds']:.2f}",
                f"{found['cpu_seconds_beyond_floor']:.2f}",
                f"{found['gb_per_cpu_second']:.2f}",
                f"{found['seconds']:.2f}",
                f"{found['seconds_over_floor']:.2f}",
                f"{found['gb_per_second']:.2f}",
                size(found["peak_rss_bytes"]),
            ]
