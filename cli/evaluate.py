"""moequant evaluate REFERENCE TEST... --data FILE."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.failures import FailedResult, InterruptedWork
from moequant.cli.output import Output, count, write_plot
from moequant.cli.streamed_plan import describe_computation, describe_data, describe_needs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from moequant.evaluation import EvaluationPlan, EvaluationResult, ModelResult
    from moequant.runtime.activations import ActivationsChoice

_FIGURES = (">perplexity", ">KL mean", ">± se", ">median", ">99 %", ">99.9 %", ">same top token")
_RATIO = (">KL / first", ">± se")
"""Of each TEST but the first."""


@click.command(
    "evaluate",
    short_help="Measure perplexity and KL divergence from a reference.",
    epilog=options.examples(
        "moequant evaluate Qwen/Qwen3-30B-A3B qwen3-nvfp4 qwen3-mxfp4 --data held-out.txt",
        "moequant evaluate source out --data text.txt --noise-floor --device cuda",
    ),
)
@click.argument("reference", type=options.DIRECTORY)
@click.argument("tests", nargs=-1, metavar="[TEST]...", type=options.DIRECTORY)
@click.option(
    "--data", required=True, type=options.FILE, metavar="FILE",
    help="Text, whose sections form feeds separate, or a dataset FILE.jsonl as for calibrate.",
)  # fmt: skip
@click.option(
    "--windows", type=click.IntRange(1, 1_000_000), default=16, show_default=True, metavar="N",
    help="Number of windows, evenly from all sections.",
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(2, 1_000_000), default=512, show_default=True, metavar="N",
    help="Tokens of a window.",
)  # fmt: skip
@click.option(
    "--as", "run_as", type=click.Choice(["weights", "runtime"]), default="weights",
    show_default=True,
    help="Run each TEST as what its weights decode to, or its experts on moequant's runtime, with "
    "quantized activations.",
)  # fmt: skip
@options.backend_option("Backend of the runtime.  [default: the best one for the device]")
@options.activations_option
@options.compute_device_option
@options.compute_dtype_option
@click.option(
    "--noise-floor", is_flag=True,
    help="Also compare REFERENCE with itself in the other dtype, which runs it once more.",
)  # fmt: skip
@click.option(
    "--keep", metavar="FILE", type=options.FILE,
    callback=options.check_written_file,
    help="Keep the reference's predictions in FILE, or use those in it instead of running it.",
)  # fmt: skip
@options.batch_tokens_option
@options.folder_option("Where to keep activations meanwhile.")
@options.plot_option("the mean KL divergence, by section")
@options.architecture_option
@options.revision_option
@options.run_nothing_option
@options.json_option
@options.quiet_option
def command(
    reference: str,
    tests: tuple[str, ...],
    data: Path,
    tokens: int,
    activations: ActivationsChoice,
    backend: str | None,
    noise_floor: bool,
    keep: Path | None,
    plot: Path | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Compare what each TEST predicts with what REFERENCE predicts, over text.

    One layer is in memory at a time. REFERENCE and TEST are checkpoints with the same tokenizer,
    quantized or not; REFERENCE may be the id of a repository on the hub. Needs transformers and
    accelerate: pip install 'moequant[transformers]'.
    """
    if not (tests or noise_floor or keep):
        raise click.UsageError("give a TEST to compare, --noise-floor, or --keep")
    if settings["run_as"] == "weights" and (backend is not None or activations != "format"):
        raise click.UsageError("--backend and --activations are of --as runtime")
    from moequant.evaluation import evaluate
    from moequant.evaluation.plot import plot_evaluation

    out = Output(as_json=as_json, quiet=quiet)

    def show_plan(plan: EvaluationPlan) -> None:
        if not (as_json or quiet):
            _show_plan(out, plan, noise_floor=noise_floor)

    try:
        with out.progress() as progress:
            result = evaluate(
                reference,
                tests,
                data,
                window_tokens=tokens,
                activations=activations,
                backend=backend,
                noise_floor=noise_floor,
                keep=keep,
                dry_run=dry_run,
                progress=progress,
                on_plan=show_plan,
                **settings,
            )
    except KeyboardInterrupt:
        raise InterruptedWork from None
    document = _describe(result)
    show = None if dry_run else _show_result
    failed = None if dry_run else write_plot(plot, lambda: plot_evaluation(result))
    if not (as_json and failed):
        out.result(document, show)
    if failed:
        raise FailedResult(failed, document)


def _show_plan(out: Output, plan: EvaluationPlan, *, noise_floor: bool) -> None:
    data = plan.data
    parts = (
        f"{count(data['windows'], 'window')} of {data['window_tokens']} tokens, from "
        f"{count(len(data['windows_by_section']), 'section')}"
    )
    experts = {
        "weights": "dequantized weights; activations are not quantized (--as runtime)",
        "runtime": "moequant's runtime, with its activations",
    }
    kept = {
        None: "not kept (--keep FILE)",
        "written": "kept for the next call",
        "read": "read from the file; not run again",
    }
    out.fields(
        {
            "data": describe_data(parts, chat_template=data["chat_template"]),
            "computed": describe_computation(plan.computed),
            "tests": experts[plan.run_as],
            "reference": kept[plan.kept],
            "noise floor": "measured in one more pass"
            if noise_floor
            else "not measured (--noise-floor, one more pass of the reference)",
            **describe_needs(plan.memory.peak_bytes, plan.disk_bytes),
        }
    )


def _describe(result: EvaluationResult) -> dict[str, Any]:
    from moequant.evaluation.run import KL_DEFINITION

    plan, floor = result.plan, result.noise_floor
    return {
        "reference": str(plan.reference),
        "tests": [_describe_model(test, result.tests[0]) for test in result.tests],
        "noise_floor": None if floor is None else _describe_model(floor, None),
        "kl": KL_DEFINITION,
        "as": plan.run_as,
        "data": plan.data,
        "run": plan.computed,
        "reference_predictions": plan.kept,
        "peak_bytes": plan.memory.peak_bytes,
        "memory": asdict(plan.memory),
        "disk_bytes": plan.disk_bytes,
        "seconds": round(result.seconds, 3),
    }


def _describe_model(found: ModelResult, first: ModelResult | None) -> dict[str, Any]:
    """The figures of a test; those of its ratio to the `first` one, if it is another."""
    from moequant.evaluation.figures import kl_ratio

    another = first is not None and found is not first
    ratio = kl_ratio(found.figures, first.figures) if first is not None and another else None
    return {
        "name": found.name,
        "dtype": found.dtype,
        "as": found.run_as,
        "backends": list(found.backends),
        **asdict(found.figures),
        "kl_over_first_test": None if ratio is None else asdict(ratio),
    }


def _show_result(out: Output, result: Mapping[str, Any]) -> None:
    floor = result["noise_floor"]
    rows = result["tests"] + ([] if floor is None else [floor])
    if not rows:
        out.line(f"The reference's predictions were {result['reference_predictions']}.")
        return
    out.line()
    ratios = _RATIO if len(result["tests"]) > 1 else ()
    out.table(["model", "experts", *_FIGURES, *ratios], _rows(result, rows, len(ratios)))
    out.line()
    out.table(
        [">section", ">windows", ">perplexity", *(f">KL {row['name']}" for row in rows)],
        _sections(rows),
    )
    out.line()
    out.line(f"{result['kl']}; standard errors are over windows. {result['seconds']:.1f} s")


def _rows(
    result: Mapping[str, Any], rows: list[dict[str, Any]], ratios: int
) -> Iterator[list[str]]:
    reference = rows[0]["perplexity_reference"]
    yield [result["reference"], result["run"]["dtype"], f"{reference:.3f}", *["-"] * (6 + ratios)]
    for row in rows:
        yield [
            row["name"],
            ", ".join(row["backends"]) or row["dtype"],
            f"{row['perplexity']:.3f}",
            f"{row['kl_mean']:.4g}",
            _error(row["kl_mean_se"]),
            *(f"{row[name]:.4g}" for name in ("kl_median", "kl_99", "kl_999")),
            f"{row['same_top']:.2%}",
            *_ratio(row["kl_over_first_test"])[:ratios],
        ]


def _ratio(found: Mapping[str, Any] | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found['ratio']:.3f}", _error(found["se"]))


def _sections(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for place, section in enumerate(rows[0]["sections"]):
        found = [row["sections"][place] for row in rows]
        yield [
            str(section["section"]),
            str(section["windows"]),
            f"{section['perplexity_reference']:.3f}",
            *(f"{one['kl_mean']:.4g} ± {_error(one['kl_mean_se'])}" for one in found),
        ]


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.2g}"
