"""moequant tune --shape all|NAME,... --tokens LIST."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.bench_experts import describe_tiling, parse_tokens
from moequant.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moequant.runtime.activations import ActivationsChoice

TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"


@click.command(
    "tune",
    short_help="Find and save the fastest kernel tilings.",
    epilog=options.examples(
        "moequant tune --shape qwen3-30b",
        "moequant tune --shape 128x2048x768x8 --tokens 1,64 --format fp8_block",
    ),
)
@click.option(
    "--shape",
    metavar="all|NAME,...",
    required=True,
    help="Layers: models such as qwen3-30b, sizes such as 128x2048x768x8, or all known models.",
)
@click.option(
    "--tokens", default=TOKENS, show_default=True, metavar="LIST", callback=parse_tokens,
    help="Numbers of tokens.",
)  # fmt: skip
@options.tuned_formats_option
@options.activations_option
@options.backend_option("Backend to tune; by default the best.")
@click.option(
    "--device", default="cuda", show_default=True, metavar="DEVICE", help="CUDA device to use."
)
@click.option(
    "--output", metavar="FILE.json", type=options.FILE,
    callback=options.check_written_file,
    help="Table to write to, of one format.  [default: this user's table, which later calls read]",
)  # fmt: skip
@options.json_option
@options.quiet_option
def command(
    shape: str,
    tokens: list[int],
    format: list[str] | None,
    activations: ActivationsChoice,
    backend: str | None,
    device: str,
    output: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Time the tilings of kernels for layers, and save the fastest.

    Entries of the table for other layers and numbers of tokens stay.
    """
    from moequant.benchmarks.shapes import parse_shapes
    from moequant.benchmarks.tune import tune

    out = Output(as_json=as_json, quiet=quiet)
    shapes = parse_shapes(shape)
    with out.progress() as progress:
        document = tune(
            shapes,
            tokens,
            formats=format,
            activations=activations,
            backend=backend,
            device=device,
            path=output,
            progress=progress,
        )
    out.result(document, _show)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    out.table(
        ["shape", "format", ">tokens", ">us before", ">us after", ">tried", "before", "after"],
        [
            [
                cell["shape"],
                cell["format"],
                str(cell["tokens"]),
                f"{cell['before']['time_us']:.1f}",
                f"{cell['after']['time_us']:.1f}",
                str(len(cell["tried"])),
                describe_tiling(cell["before"]["tiling"]),
                describe_tiling(cell["after"]["tiling"])
                if cell["after"] != cell["before"]
                else "the same",
            ]
            for cell in document["cells"]
        ],
    )
    for table in document["tables"].values():
        out.line(f"{document['gpu']}, written to {table}")
    for layer, reason in document["refusals"].items():
        out.line(f"not tuned: {layer}: {reason}")
