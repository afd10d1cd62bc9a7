"""moequant tune --shape NAME --tokens LIST."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.bench_experts import parse_tokens
from moequant.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"


@click.command("tune", short_help="Find and keep the fastest tilings for a layer.")
@click.option(
    "--shape",
    metavar="NAME|ExHxIxT",
    required=True,
    help="A model such as qwen3-30b, or sizes such as 128x2048x768x8.",
)
@click.option(
    "--tokens", default=TOKENS, show_default=True, metavar="LIST", callback=parse_tokens,
    help="Numbers of tokens.",
)  # fmt: skip
@click.option(
    "--device", default="cuda", show_default=True, metavar="DEVICE", help="CUDA device to use."
)
@click.option(
    "--output", metavar="FILE.json", type=click.Path(path_type=Path, dir_okay=False),
    help="Table to write.  [default: this user's, which every later call looks into]",
)  # fmt: skip
@options.json_option
@options.quiet_option
def command(
    shape: str, tokens: list[int], device: str, output: Path | None, as_json: bool, quiet: bool
) -> None:
    """Time the tilings of the FP8 block kernels for a layer, and keep the fastest."""
    from moequant.benchmarks.shapes import parse_shape
    from moequant.benchmarks.tune import tune

    out = Output(as_json=as_json, quiet=quiet)
    with out.progress() as progress:
        result = tune(parse_shape(shape), tokens, device=device, path=output, progress=progress)
    out.result(asdict(result), _show)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    cells = document["cells"]
    knobs = list(cells[0]["tiling"])
    out.table(
        [">tokens", *(f">{knob}" for knob in knobs), ">us", ">formula us", ">tried"],
        [
            (
                str(cell["tokens"]),
                *(str(cell["tiling"][knob]) for knob in knobs),
                f"{cell['time_us']:.1f}",
                f"{cell['default_us']:.1f}",
                str(cell["candidates"]),
            )
            for cell in cells
        ],
    )
    out.line(f"{document['gpu']}, written to {document['path']}")
