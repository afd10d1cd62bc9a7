"""moequant bench experts --shape all|NAME,... --tokens LIST [--against NAME,...]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.failures import FailedResult
from moequant.cli.output import KeptDocument, Output, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from moequant.runtime.activations import ActivationsChoice

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


def describe_tiling(tiling: Mapping[str, Any] | None) -> str:
    """A tiling in a few words: its enabled features, and its numbers other than 1."""
    if tiling is None:
        return "-"
    parts = [
        name if value is True else f"{name} {value}"
        for name, value in tiling.items()
        if value is not False and (value != 1 or value is True)
    ]
    return ", ".join(parts)


@click.command(
    "experts",
    short_help="Time fused experts on a GPU.",
    epilog=options.examples(
        "moequant bench experts --shape qwen3-30b --against triton,grouped_mm",
    ),
)
@click.option(
    "--shape",
    required=True,
    metavar="all|NAME,...",
    help="Layers to time: models such as qwen3-30b, sizes such as 128x2048x768x8 (experts, hidden, "
    "intermediate, experts per token; gated SiLU without biases), or all known models.",
)
@click.option(
    "--tokens", default=TOKENS, show_default=True, metavar="LIST", callback=parse_tokens,
    help="Numbers of tokens.",
)  # fmt: skip
@options.benched_format_option
@options.activations_option
@options.routing_option
@options.backend_option("Backend to time; by default the best.")
@click.option(
    "--against", metavar="NAME,...", default="",
    help="Also time other backends, grouped_mm (torch in BF16), vllm or humming.",
)  # fmt: skip
@click.option("--stages", is_flag=True, help="Also time each kernel launch separately.")
@click.option("--host", is_flag=True, help="Also time the host side of an eager call.")
@click.option(
    "--device", default="cuda", show_default=True, metavar="DEVICE", help="CUDA device to use."
)
@options.kept_document_option("layer")
@options.json_option
def command(
    shape: str,
    tokens: list[int],
    format: str,
    activations: ActivationsChoice,
    routing: list[str],
    backend: str | None,
    against: str,
    stages: bool,
    host: bool,
    device: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time layers of random experts, from hidden states to output.

    Times are medians of CUDA-graph replays. They are compared with a floor: the time this GPU needs
    for the same bytes and operations at its measured peak rates.
    """
    out = Output(as_json=as_json)
    names = [name for name in against.split(",") if name]
    from moequant.benchmarks.experts import Measure, bench_experts
    from moequant.benchmarks.shapes import parse_shapes

    shapes = parse_shapes(shape)
    measure = Measure(
        tokens=tokens,
        format=format,
        activations=activations,
        routings=routing,
        backend=backend,
        against=names,
        stages=stages,
        host=host,
    )
    kept = KeptDocument(output)
    with out.progress() as progress:
        for document in bench_experts(shapes, measure, device=device, progress=progress):
            # After every layer, so that an interruption costs no more than one.
            kept(document)
    if not (as_json and kept.error):
        out.result(document, _show)
    if kept.error:
        raise FailedResult(kept.error, document)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    machine, ceilings = document["machine"], document["ceilings"]
    out.line(
        f"{machine['gpu']}, {document['format']} with activations in {document['activations']}, "
        f"{document['measured']}"
        if document["activations"] != "none"
        else f"{machine['gpu']}, {document['format']}, {document['measured']}"
    )
    out.line(", ".join(f"{name} {text}" for name, text in machine.items() if name != "gpu"))
    fp8 = f"FP8 {ceilings['fp8_tflops']:.0f}, " if ceilings["fp8_tflops"] else ""
    out.line(
        f"measured peaks: reads {ceilings['read_tb_per_s']:.2f} TB/s, GEMMs {fp8}"
        f"BF16 {ceilings['bf16_tflops']:.0f} TFLOPS; floors with {document['products'].upper()}"
    )
    for layer in document["layers"]:
        _show_layer(out, layer)


def _show_layer(out: Output, layer: Mapping[str, Any]) -> None:
    out.line()
    biases = "biases" if layer["biased"] else "no biases"
    out.line(
        f"{layer['shape']}: {layer['experts']} experts, {layer['topk']} per token, "
        f"hidden {layer['hidden']}, intermediate {layer['intermediate']}, {layer['act_fn']}, "
        f"{biases}; by {layer['backend']}"
    )
    cells = layer["cells"]
    timed = dict.fromkeys(name for cell in cells for name in cell["times"])
    others = [name for name in timed if name != "moequant"]
    stages = list(dict.fromkeys(name for cell in cells for name in cell["stages_us"] or ()))
    host = any(cell["host_us"] for cell in cells)
    routed = any(cell["routing"] != "uniform" for cell in cells)
    numbers = ["us", "p20", "p80", "moved", "TB/s", "TFLOPS", "floor us", "share"]
    numbers += ["x uniform"] if routed else []
    numbers += [f"{name} us" for name in others]
    numbers += ["host us"] if host else []
    out.table(
        [*_cell_head(routed=routed), *(f">{name}" for name in numbers), "tiling"],
        [list(_row(cell, others, routed=routed, host=host)) for cell in cells],
    )
    if stages:
        out.table(
            [*_cell_head(routed=routed), *(f">{name} us" for name in stages)],
            [[*_cell_of(cell, routed=routed), *_stage_times(cell, stages)] for cell in cells],
        )
    for name, reason in layer["refusals"].items():
        out.line(f"{name} was not timed: {reason}")


def _cell_head(*, routed: bool) -> list[str]:
    return [">tokens", *(["routing", ">experts", ">busiest"] if routed else [])]


def _cell_of(cell: Mapping[str, Any], *, routed: bool) -> Iterator[str]:
    yield str(cell["tokens"])
    if routed:
        yield cell["routing"]
        yield f"{cell['experts_used']:.0f}"
        yield f"{cell['busiest_pairs']:.0f}"


def _row(
    cell: Mapping[str, Any], others: Sequence[str], *, routed: bool, host: bool
) -> Iterator[str]:
    ours = cell["times"]["moequant"]
    yield from _cell_of(cell, routed=routed)
    yield from (f"{ours[key]:.1f}" for key in ("median_us", "p20_us", "p80_us"))
    yield size(round(cell["bytes_moved"]))
    yield f"{cell['tb_per_s']:.2f}"
    yield f"{cell['tflops']:.0f}"
    yield f"{cell['floor_us']:.1f}"
    yield f"{cell['share_of_floor']:.0%}"
    if routed:
        yield "-" if cell["to_uniform"] is None else f"{cell['to_uniform']:.2f}"
    for name in others:
        yield f"{cell['times'][name]['median_us']:.1f}" if name in cell["times"] else "-"
    if host:
        yield f"{cell['host_us']:.0f}" if cell["host_us"] else "-"
    yield describe_tiling(cell["tiling"])


def _stage_times(cell: Mapping[str, Any], stages: Sequence[str]) -> Iterator[str]:
    times = cell["stages_us"] or {}
    return (f"{times[name]:.1f}" if name in times else "-" for name in stages)
