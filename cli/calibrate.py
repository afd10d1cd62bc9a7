"""moequant calibrate SOURCE --data FILE -o STATS."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.failures import InterruptedWork
from moequant.cli.output import Output, count, ranges
from moequant.cli.streamed_plan import describe_computation, describe_data, describe_needs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moequant.calibration import CalibrationPlan, CalibrationResult


@click.command(
    "calibrate",
    short_help="Measure what a model's experts multiply, over text.",
    epilog=options.examples(
        "moequant calibrate Qwen/Qwen3-30B-A3B --data text.txt -o qwen3.stats",
        "moequant calibrate source --data chats.jsonl --hessian --device cuda -o qwen3.stats",
    ),
)
@click.argument("source", type=options.DIRECTORY)
@click.option(
    "--data",
    required=True,
    type=options.FILE,
    metavar="FILE",
    help="Text, or a dataset FILE.jsonl whose lines have text, messages or input_ids.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=options.FILE,
    callback=options.check_written_file,
    metavar="STATS",
    help="File of statistics to write.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    metavar="N",
    help="Run at most N tokens, in whole windows from all of the data.",
)
@click.option(
    "--window",
    type=click.IntRange(2, 1_000_000),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens of the longest sequence; longer samples are cut.",
)
@options.batch_tokens_option
@options.compute_device_option
@options.compute_dtype_option
@click.option("--hessian", is_flag=True, help="Also record second moments, for GPTQ.")
@click.option(
    "--prior-tokens",
    type=click.IntRange(1, 1_000_000),
    default=64,
    show_default=True,
    metavar="N",
    help="The statistics of a layer count for N tokens in those of each expert.",
)
@options.architecture_option
@options.revision_option
@options.run_nothing_option
@options.overwrite_option
@options.json_option
@options.quiet_option
def command(
    source: str,
    data: Path,
    output: Path,
    window: int,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Run SOURCE over text, and record what its routed experts multiply, for `convert`.

    One layer is in memory at a time. SOURCE is a directory or the id of a repository on the hub,
    quantized or not. Run the same command again to continue an interrupted calibration. Needs
    transformers and accelerate: pip install 'moequant[transformers]'.
    """
    from moequant.calibration import calibrate

    out = Output(as_json=as_json, quiet=quiet)

    def show_plan(plan: CalibrationPlan) -> None:
        if not (as_json or quiet):
            _show_plan(out, plan)

    try:
        with out.progress() as progress:
            result = calibrate(
                source,
                data,
                output,
                window_tokens=window,
                dry_run=dry_run,
                progress=progress,
                on_plan=show_plan,
                **settings,
            )
    except KeyboardInterrupt:
        raise InterruptedWork from None
    out.result(_describe(result), None if dry_run else _show_result)


def _show_plan(out: Output, plan: CalibrationPlan) -> None:
    record = plan.record
    data = record.data
    parts = (
        f"{count(data.tokens, 'token')} in {count(data.windows, 'window')}, from "
        f"{count(data.samples, 'sample')}"
    )
    out.fields(
        {
            "model": f"{record.architecture}, {plan.last_layer + 1} layers, with experts: "
            f"{ranges(record.layers)}",
            **_describe_unrun(plan),
            "data": describe_data(parts, chat_template=data.chat_template),
            "computed": describe_computation(record.run),
            **describe_needs(plan.memory.peak_bytes, plan.disk_bytes),
        }
    )


def _describe_unrun(plan: CalibrationPlan) -> dict[str, str]:
    """What is said of multi-token prediction, if the checkpoint has any."""
    parts = []
    if plan.uncalibrated:
        parts.append(
            f"experts of layers {ranges(plan.uncalibrated)}, which `convert` quantizes without "
            "statistics"
        )
    if plan.kept_tensors:
        parts.append(f"{count(plan.kept_tensors, 'other tensor')}, which it keeps")
    return {"not run": f"multi-token prediction: {'; '.join(parts)}"} if parts else {}


def _describe(result: CalibrationResult) -> dict[str, Any]:
    plan, found = result.plan, result.statistics
    return {
        "state": result.state,
        "output": str(plan.output),
        "sha256": found and found.digest,
        "architecture": plan.record.architecture,
        "expert_layers": list(plan.record.layers),
        "uncalibrated_layers": list(plan.uncalibrated),
        "kept_prediction_tensors": plan.kept_tensors,
        "experts": plan.record.experts,
        "data": plan.record.data.model_dump(),
        "run": plan.record.run,
        "hessian": plan.record.hessian,
        "prior_tokens": plan.record.prior_tokens,
        "peak_bytes": plan.memory.peak_bytes,
        "memory": asdict(plan.memory),
        "disk_bytes": plan.disk_bytes,
        "resumed_layers": result.resumed_layers,
        "seconds": round(result.seconds, 3),
        "layers": [] if found is None else [found.coverage(n) for n in found.layers],
    }


def _show_result(out: Output, result: Mapping[str, Any]) -> None:
    out.line()
    out.table(
        [
            ">layer",
            ">fewest",
            ">median",
            ">most",
            ">hidden amax",
            ">down amax",
            "shrunk to layer's",
        ],
        [
            (
                row["layer"],
                min(row["tokens"]),
                f"{median(row['tokens']):.0f}",
                max(row["tokens"]),
                f"{row['hidden_amax']:.4g}",
                f"{row['intermediate_amax']:.4g}",
                _shrunk(row),
            )
            for row in result["layers"]
        ],
    )
    out.line()
    prior = result["prior_tokens"]
    unrouted = sum(len(row["unrouted"]) for row in result["layers"])
    few = sum(len(row["mostly_pooled"]) for row in result["layers"])
    whole = result["experts"] * len(result["layers"])
    out.line(
        f"Of {count(whole, 'expert')}, {unrouted} saw no token and have the statistics of their "
        f"layer; {few} saw fewer than {prior}, and have more of their layer's than of their own."
    )
    done = f"{result['output']}: {result['state']}"
    if result["state"] == "calibrated":
        done += f" in {result['seconds']:.1f} s"
        if result["resumed_layers"]:
            done += f", after {count(result['resumed_layers'], 'layer')} of an earlier run"
    out.line(f"{done}; sha256 of its header {result['sha256'][:16]}")


def _shrunk(row: Mapping[str, Any]) -> str:
    parts = []
    if row["unrouted"]:
        parts.append(f"wholly: {ranges(row['unrouted'])}")
    if row["mostly_pooled"]:
        parts.append(f"mostly: {ranges(row['mostly_pooled'])}")
    return "; ".join(parts)
