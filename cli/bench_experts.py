"""moequant bench experts --shape NAME --tokens LIST."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import Output, size

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS = "1,8,32,128,512,2048,8192"


def parse_tokens(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Numbers of tokens, at least 1, separated by commas; a click callback."""
    try:
        tokens = [int(part) for part in value.split(",")]
    except ValueError:
        tokens = [0]
    if min(tokens) < 1:
        raise click.BadParameter(f"{value!r} is not a list such as 1,8,512", ctx, param)
    return tokens


@click.command("experts", short_help="Time fused experts on a GPU.")
@click.option(
    "--shape",
    metavar="NAME|ExHxIxT",
    help="Layer to time: a model such as qwen3-30b, or sizes such as 128x2048x768x8.",
)
@click.option(
    "--tokens", default=TOKENS, show_default=True, metavar="LIST", callback=parse_tokens,
    help="Numbers of tokens.",
)  # fmt: skip
@options.benched_format_option
@click.option("--backend", metavar="NAME", help="Backend to time; by default the best.")
@click.option(
    "--against", metavar="NAME,...", default="",
    help="Also time these: other backends, grouped_mm (torch in BF16), vllm.",
)  # fmt: skip
@click.option(
    "--device", default="cuda", show_default=True, metavar="DEVICE", help="CUDA device to use."
)
@click.option(
    "--plot", metavar="FILE.png", type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the times.",
)  # fmt: skip
@click.option(
    "--from", "saved", metavar="FILE.json", type=click.Path(path_type=Path, dir_okay=False),
    help="Show what --json printed before, instead of measuring.",
)  # fmt: skip
@options.json_option
def command(
    shape: str | None,
    tokens: list[int],
    format: str,
    backend: str | None,
    against: str,
    device: str,
    plot: Path | None,
    saved: Path | None,
    as_json: bool,
) -> None:
    """Time a layer of random experts, from hidden states to output.

    Medians of CUDA-graph replays, beside the floor of the routing timed and this GPU's ceilings.
    """
    out = Output(as_json=as_json)
    if (shape is None) == (saved is None):
        raise click.UsageError("give --shape to measure, or --from to show what was measured")
    if plot is not None:
        from moequant.benchmarks.plot import check_plots

        check_plots()
    if saved is not None:
        from moequant.benchmarks.saved import read_run

        document = read_run(saved)
    else:
        from moequant.benchmarks.experts import bench_experts
        from moequant.benchmarks.shapes import parse_shape

        assert shape is not None
        document = bench_experts(
            parse_shape(shape),
            tokens,
            format=format,
            backend=backend,
            against=[name for name in against.split(",") if name],
            device=device,
            name=shape,
        ).document()
    if plot is not None:
        from moequant.benchmarks.plot import plot_experts

        plot_experts(document, plot)
    out.result(document, _show)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    machine, ceilings = document["machine"], document["ceilings"]
    versions = ", ".join(f"{name} {text}" for name, text in machine.items() if name != "gpu")
    out.line(f"{document['shape']}, {document['format']} by {document['backend']}")
    out.line(f"{machine['gpu']}, {versions}")
    fp8 = f"FP8 {ceilings['fp8_tflops']:.0f}, " if ceilings["fp8_tflops"] else ""
    out.line(
        f"reads {ceilings['read_tb_per_s']:.2f} TB/s, multiplies {fp8}"
        f"BF16 {ceilings['bf16_tflops']:.0f} TFLOPS"
    )
    out.line()
    cells = document["cells"]
    others = list(dict.fromkeys(name for cell in cells for name in cell["times"]))[1:]
    numbers = ["us", "p20", "p80", "moved", "TB/s", "TFLOPS", "floor us", "share"]
    columns = [">tokens", *(f">{name}" for name in numbers)]
    out.table([*columns, *(f">{name} us" for name in others)], [_row(c, others) for c in cells])
    for name, reason in cells[0]["refusals"].items():
        out.line(f"{name} was not timed: {reason}")


def _row(cell: Mapping[str, Any], others: list[str]) -> list[str]:
    ours = next(iter(cell["times"].values()))
    return [
        str(cell["tokens"]),
        *(f"{ours[key]:.1f}" for key in ("median_us", "p20_us", "p80_us")),
        size(round(cell["bytes_moved"])),
        f"{cell['tb_per_s']:.2f}",
        f"{cell['tflops']:.0f}",
        f"{cell['floor_us']:.1f}",
        f"{cell['share_of_floor']:.0%}",
        *(f"{cell['times'][n]['median_us']:.1f}" if n in cell["times"] else "-" for n in others),
    ]
