"""moequant demo: run every step on a small generated checkpoint, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.output import Output, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.progress import Progress

RESULT_FILE = "moequant-demo.json"
"""Marks a folder that the demo wrote, and holds its result."""
TARGET = "sm90"
TOKENS = 16


@click.command(
    "demo",
    short_help="Convert, prepare, verify and run a small checkpoint.",
    epilog=options.examples(
        "moequant demo",
        "moequant demo --output folder",
    ),
)
@click.option(
    "--output",
    type=options.DIRECTORY,
    default="moequant-demo",
    show_default=True,
    metavar="DIR",
    help="Where to write; an earlier demo there is replaced.",
)
@options.json_option
@options.quiet_option
def command(output: str, as_json: bool, quiet: bool) -> None:
    """Generate a small Qwen3-MoE checkpoint and convert it into every format.

    Each result is verified, prepared for the kernels of one target, and run.
    """
    from moequant.benchmarks.random_checkpoint import write_demo_checkpoint
    from moequant.formats import CONVERTIBLE
    from moequant.quantizers.worker_pool import worker_pool

    out = Output(as_json=as_json, quiet=quiet)
    folder = Path(output)
    _claim(folder)
    source = folder / "source"
    write_demo_checkpoint(source)
    # One intra-op thread: the matrices are too small for a second one to help, and on a busy
    # machine threads wait for each other (a 3 s demo took 70 s).
    with out.progress() as progress, worker_pool(1) as pool:
        rows = [
            pool.submit(_run, source, folder / format, format, progress).result()
            for format in CONVERTIBLE
        ]
    document = {"source": str(source), "formats": rows}
    (folder / RESULT_FILE).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    out.result(document, _show)


def _claim(folder: Path) -> None:
    """Create the folder and mark it as the demo's.

    Raises:
        MoequantError: it is not empty and not an earlier demo's, or cannot be written to.
    """
    from moequant.errors import MoequantError

    other = "choose another directory with --output"
    marker = folder / RESULT_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not marker.exists() and any(folder.iterdir()):
            raise MoequantError(f"{folder}: not empty, and not an earlier demo; {other}")
        marker.write_text("{}\n", "utf-8")
    except OSError as error:
        raise MoequantError(f"{folder}: {error.strerror}; {other}") from error


def _run(source: Path, converted: Path, format: str, progress: Progress) -> dict[str, Any]:
    """Convert into one format, verify, prepare, and run a layer."""
    from moequant.conversion import convert
    from moequant.errors import NumericsError
    from moequant.preparation import prepare
    from moequant.verification import verify

    plan = convert(source, converted, format=format, overwrite=True, progress=progress).plan
    report = verify(converted, against=source, progress=progress)
    if not report.ok:
        raise NumericsError("\n".join(map(str, report.problems)))
    prepared = prepare(converted, target=TARGET, progress=progress).folder
    _run_layer(converted, prepared, report.layers[0].layer)
    return {
        "format": format,
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "sqnr_db": report.formats[0].total.sqnr_db,
        "layer_error": max(layer.layer_error for layer in report.layers),
        "quantized_activations_error": max(
            layer.quantized_activations_error
            for layer in report.layers
            if layer.quantized_activations_error is not None
        ),
        "path": str(converted),
        "prepared": str(prepared),
    }


def _run_layer(converted: Path, prepared: Path, layer: int) -> None:
    """Run a layer from the portable files and from the prepared ones.

    Raises:
        NumericsError: the results differ.
    """
    import torch

    from moequant.benchmarks.random_checkpoint import EXPERTS, HIDDEN, TOP_K
    from moequant.errors import NumericsError
    from moequant.runtime import load_experts

    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    router_logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    topk_weights, topk_ids = router_logits.softmax(-1).topk(TOP_K)
    portable, ready = (
        load_experts(path, layer)(hidden_states, topk_weights, topk_ids)
        for path in (converted, prepared)
    )
    if not torch.equal(portable, ready):
        raise NumericsError(
            f"{prepared}: layer {layer} gives another output than {converted}, from which it was "
            "prepared; please report this bug"
        )


def _show(out: Output, document: Mapping[str, Any]) -> None:
    out.table(
        ["format", ">before", ">after", ">weight SQNR", ">layer error", "where"],
        [
            (
                row["format"],
                size(row["source_bytes"]),
                size(row["output_bytes"]),
                f"{row['sqnr_db']:.1f} dB",
                f"{row['layer_error']:.2%}",
                row["path"],
            )
            for row in document["formats"]
        ],
    )
