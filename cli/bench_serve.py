"""moequant bench serve [MODEL]... [--shape NAME --layers N --format LIST] [--engine LIST]."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from moequant.cli import options
from moequant.cli.bench_experts import parse_tokens
from moequant.cli.failures import FailedResult
from moequant.cli.output import KeptDocument, Output, write_plot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moequant.runtime.activations import ActivationsChoice


@click.command(
    "serve",
    short_help="Time whole models in vLLM, transformers and moequant.",
    epilog=options.examples(
        "moequant bench serve --shape qwen3-30b --layers 12 --format fp8_block,nvfp4",
    ),
)
@click.argument("models", nargs=-1, metavar="[MODEL]...", type=click.Path(path_type=Path))
@click.option(
    "--shape", metavar="NAME",
    help="Also time a model of random weights: qwen3-30b, deepseek-v3, gpt-oss-120b or "
    "gpt-oss-20b.",
)  # fmt: skip
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="Its number of layers.")
@click.option(
    "--vocabulary", type=click.IntRange(min=1), metavar="N",
    help="Its number of tokens.  [default: that of the release]",
)  # fmt: skip
@options.served_formats_option
@options.engines_option
@options.activations_option
@click.option(
    "--batch", "batches", default="1,8,32,128", show_default=True, metavar="LIST",
    callback=parse_tokens, help="Sequences that are decoded at once.",
)  # fmt: skip
@click.option(
    "--prefill", type=click.IntRange(min=1), default=8192, show_default=True, metavar="N",
    help="Tokens of a prefill, in 8 prompts.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=1), default=128, show_default=True, metavar="N",
    help="Decoding steps to time.",
)  # fmt: skip
@options.rounds_option("Times each call is timed; the least counts.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=600, show_default=True,
    metavar="SECONDS", help="Give up an engine after this time.",
)  # fmt: skip
@click.option(
    "--attention-backend", metavar="NAME",
    help="vLLM's attention, such as TRITON_ATTN.  [default: vLLM's choice]",
)  # fmt: skip
@click.option(
    "--tensor-parallel", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="Number of GPUs, for vLLM.",
)  # fmt: skip
@click.option("--expert-parallel", is_flag=True, help="Divide experts among these GPUs.")
@click.option(
    "--profile", is_flag=True,
    help="Also say how long the GPU, of several the first, is busy in a step; --json has the "
    "kernels.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True,
    help="Where to time; vLLM is timed on cuda only.",
)  # fmt: skip
@options.folder_option("Where to write models of random weights.")
@options.kept_document_option("engine")
@options.plot_option("the share of the floor")
@options.json_option
def command(
    models: tuple[Path, ...],
    shape: str | None,
    layers: int | None,
    vocabulary: int | None,
    format: list[str],
    engine: list[str],
    activations: ActivationsChoice,
    batches: list[int],
    prefill: int,
    steps: int,
    rounds: int,
    timeout: float,
    attention_backend: str | None,
    tensor_parallel: int,
    expert_parallel: bool,
    profile: bool,
    device: str,
    folder: Path | None,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Time decoding and prefill of whole models, in several engines, one after the other.

    MODEL is a folder with a checkpoint. A model of random weights is converted into each --format;
    bf16 times it as it is. Times are compared with a floor: the time this device needs to read the
    weights and the KV cache of a step. An engine that is not installed or fails is named with its
    reason, and the exit code is 1.
    """
    if shape is not None and layers is None:
        raise click.UsageError(
            f"--shape {shape} needs --layers: how many of its layers to write, all of which must "
            "fit on the device in each format; 4 to 24 are usual"
        )
    if layers is not None and shape is None:
        raise click.UsageError("--layers is of a model of random weights: give --shape too")
    default = click.get_current_context().get_parameter_source("format") is ParameterSource.DEFAULT
    if shape is None and (vocabulary is not None or not default):
        raise click.UsageError(
            "--format and --vocabulary are of a model of random weights: give --shape and --layers "
            "too, or convert MODEL first"
        )
    from moequant.benchmarks.serving import RandomSource, ServingMeasure, bench_serving, failures
    from moequant.benchmarks.serving_plot import plot_serving
    from moequant.errors import MoequantError

    out = Output(as_json=as_json)
    source = None
    if shape is not None and layers is not None:
        source = RandomSource(shape=shape, layers=layers, vocabulary=vocabulary, formats=format)
    measure = ServingMeasure(
        engines=engine,
        batches=batches,
        prefill_tokens=prefill,
        steps=steps,
        rounds=rounds,
        device=device,
        activations=activations,
        attention_backend=attention_backend,
        tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel,
        profile=profile,
        timeout_s=timeout,
    )
    with out.progress() as progress:
        # After every engine, so that an interruption costs no more than one.
        kept = KeptDocument(output)
        document = bench_serving(
            models, source, measure, folder=folder, progress=progress, keep=kept
        )
    unwritten = [kept.error, write_plot(plot, lambda: plot_serving(document))]
    reasons = [str(error) for error in unwritten if error]
    if untimed := failures(document):
        reasons.insert(0, f"not timed: {', '.join(untimed)}")
    failed = MoequantError("; ".join(reasons)) if reasons else None
    if not (as_json and failed):
        out.result(document, _show)
    if failed:
        raise FailedResult(failed, document)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    out.line(", ".join(f"{name} {value}" for name, value in document["machine"].items()))
    out.line(
        f"{document['measured']}; measured peak: reads {document['read_tb_per_s']:.2f} TB/s; "
        f"activations of our experts: {document['activations']}"
    )
    for row in document["checkpoints"]:
        out.line()
        out.line(f"{row['name']}: ms a decoding step by batch, and its share of the floor")
        columns = ["engine", "version", "experts"]
        for batch in document["batches"]:
            columns += [f">{batch}", ">share"]
        columns += [f">prefill {document['prefill_tokens']}, ms"]
        out.table(columns, list(_rows(row, document)))
        if busy := list(_busy_rows(row, document)):
            out.line(f"{row['name']}: ms of these in which the GPU is busy")
            out.table(["engine", *(f">{batch}" for batch in document["batches"]), ">prefill"], busy)
        for engine in row["engines"]:
            if "error" in engine:
                out.line(f"{engine['engine']} was not timed: {engine['error']}")


def _rows(row: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[list[str]]:
    floors = [
        cell for batch in document["batches"] for cell in (f"{row['floor_ms'][str(batch)]:.3f}", "")
    ]
    yield ["floor", "", "", *floors, ""]
    for engine in row["engines"]:
        if "error" in engine:
            cells = ["-"] * (2 * len(document["batches"]) + 1)
            yield [engine["engine"], "-", "-", *cells]
            continue
        cells = [
            cell
            for step in engine["decode"]
            for cell in (f"{step['ms_per_step']:.3f}", f"{step['share_of_floor']:.0%}")
        ]
        yield [
            engine["engine"],
            engine["version"],
            engine["experts"] or "-",
            *cells,
            f"{engine['prefill']['ms']:.1f}",
        ]


def _busy_rows(row: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[list[str]]:
    """Of the engines that were profiled."""
    for engine in row["engines"]:
        if profile := engine.get("profile"):
            parts = [*map(str, document["batches"]), "prefill"]
            yield [engine["engine"], *(f"{profile[part]['busy_ms']:.3f}" for part in parts)]
