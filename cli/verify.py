"""moequant verify CONVERTED --against SOURCE | --integrity."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from moequant.cli import options
from moequant.cli.failures import FailedResult
from moequant.cli.output import (
    Output,
    count,
    show_requantization_errors,
    size,
    warnings_of_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moequant.verification import IntegrityReport, Report

_MAX_PROBLEMS = 10


@click.command(
    "verify",
    short_help="Verify a converted checkpoint against its source.",
    epilog=options.examples(
        "moequant verify qwen3-nvfp4 --against Qwen/Qwen3-30B-A3B",
        "moequant verify qwen3-nvfp4 --integrity",
    ),
)
@click.argument("converted", type=options.DIRECTORY)
@click.option(
    "--against",
    "source",
    type=options.DIRECTORY,
    metavar="SOURCE",
    help="The checkpoint it was converted from: a directory or a hub repository.",
)
@click.option(
    "--integrity",
    is_flag=True,
    help="Without SOURCE: compare every file with its size and digest in moequant.json.",
)
@options.revision_option
@options.recorded_architecture_option
@options.recorded_statistics_option
@options.recorded_activation_scales_option
@options.layers_option
@click.option(
    "--device",
    metavar="DEVICE",
    help="Run the layers on this device too, and compare with the CPU reference.  [default: cpu]",
)
@options.backend_option("Backend that runs the layers there; by default the best on the device.")
@options.workers_option
@options.json_option
@options.quiet_option
def command(
    converted: str,
    source: str | None,
    integrity: bool,
    revision: str | None,
    architecture: str | None,
    statistics: str | None,
    activation_scales: str | None,
    layers: Literal["all"] | int | None,
    device: str | None,
    backend: str | None,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check CONVERTED against SOURCE: structure, weights, prepared files, layers.

    With --integrity, check without the source that its files are unchanged since they were written.
    The exit code is 5 if a check fails; the reasons are printed. What is right against SOURCE is
    noted in CONVERTED, for `moequant push`.
    """
    options.check_one_given({"--against SOURCE": source, "--integrity": integrity or None})
    out = Output(as_json=as_json, quiet=quiet)
    of_source = {
        "revision": revision,
        "architecture": architecture,
        "statistics": statistics,
        "activation_scales": activation_scales,
        "layers": layers,
        "device": device,
        "backend": backend,
    }
    # Options that were not given are left to the library's defaults.
    asked: dict[str, Any] = {k: v for k, v in of_source.items() if v is not None}
    if source is None and asked:
        raise click.UsageError(f"--{next(iter(asked)).replace('_', '-')} needs --against")
    if workers is not None:
        asked["workers"] = workers
    from moequant.errors import NumericsError
    from moequant.verification import IntegrityReport, check_integrity, verify

    report: Report | IntegrityReport
    with out.progress() as progress:
        if source is None:
            report = check_integrity(converted, progress=progress, **asked)
        else:
            report = verify(converted, against=source, progress=progress, **asked)
    used = None if isinstance(report, IntegrityReport) else report.quantizer
    if used is not None and used.reason is not None:
        out.warn(
            f"verifying with the {used.name} quantizer, which gives the same bytes as the native "
            f"quantizer, but several times slower: {used.reason}"
        )
    if not isinstance(report, IntegrityReport):
        out.warn(
            *warnings_of_numbers(report.not_finite),
            *_fewer_layers(report, layers),
            *_unfit_scales(report),
        )
    if not report.ok:
        against = "its moequant.json" if source is None else source
        raise FailedResult(
            NumericsError(_explain(out, report, f"against {against}")), report.to_json()
        )
    if not isinstance(report, IntegrityReport) and report.record_sha256 is not None:
        _note(out, report)
    out.result(report.to_json(), _show_integrity if source is None else _show)


def _fewer_layers(report: Report, asked: Literal["all"] | int | None) -> Iterator[str]:
    """A warning where more layers were asked for than there are; of faulty ones, none is sure."""
    if report.ok and isinstance(asked, int) and asked > (run := len(report.layers)):
        yield (
            f"--layers {asked}, but there are only {count(run, 'layer')} with converted experts: "
            "every one was run; give --layers all for that"
        )


def _unfit_scales(report: Report) -> Iterator[str]:
    """The warning of the first layer that has one, and how many more have."""
    found = [layer.warning for layer in report.layers if layer.warning is not None]
    yield from found[:1]
    if len(found) > 1:
        others = len(found) - 1
        have = "has" if others == 1 else "have"
        yield f"{count(others, 'other layer')} {have} the same warning; --json shows each"


def _note(out: Output, report: Report) -> None:
    """Note that the checkpoint was verified; where it may not be written, that is no failure."""
    from moequant.errors import MoequantError
    from moequant.verification import note_verified

    try:
        note_verified(report)
    except MoequantError as error:
        out.warn(f"{error}; moequant push needs the note that it was verified")


def _show_integrity(out: Output, report: Mapping[str, Any]) -> None:
    out.line(
        f"{report['converted']}: unchanged since it was written; {count(report['files'], 'file')}, "
        f"{size(report['bytes'])}, by moequant {report['record']['moequant']}"
    )


def _explain(out: Output, report: Report | IntegrityReport, against: str) -> str:
    shown = [f"  {problem}" for problem in report.problems[:_MAX_PROBLEMS]]
    left_out = report.problem_count - len(shown)
    more = [f"  and {left_out} more"] if left_out else []
    headline = f"{report.converted}: {count(report.problem_count, 'problem')} {against}"
    # JSON output lists the problems themselves, and needs no advice.
    closing = [] if out.as_json else [f"To fix it: {_remedy(report)}"]
    return "\n".join([headline, *shown, *more, *closing])


def _remedy(report: Report | IntegrityReport) -> str:
    from moequant.storage.files import RECORD_FILE
    from moequant.verification import IntegrityReport
    from moequant.verification.prepared import remedy_for

    prepared = remedy_for(Path(report.converted).expanduser(), report.problems)
    if prepared is not None:
        return prepared
    if any(problem.unusable_record for problem in report.problems):
        return (
            f"copy {RECORD_FILE} again, verify with --against SOURCE, or convert again with "
            "--overwrite"
        )
    if any(problem.name.startswith(f"{RECORD_FILE}.source.") for problem in report.problems):
        return (
            "name the checkpoint it was converted from, which is another or was another version, "
            "or convert again with --overwrite"
        )
    if all(problem.stray for problem in report.problems):
        return "remove these files"
    if all(problem.check == "backend" for problem in report.problems):
        return "serve with another backend; the weights are right"
    again = "convert again with --overwrite, or copy the files again"
    if not isinstance(report, IntegrityReport) and _may_be_swapped(report):
        exchanged = shlex.join(["moequant", "verify", report.source, "--against", report.converted])
        return f"if {report.source} was made from {report.converted}: {exchanged}; else {again}"
    return again


def _may_be_swapped(report: Report) -> bool:
    """Whether plain weights that moequant has no record of were compared with quantized ones.

    These must be in a folder: no repository of the hub is verified.
    """
    counts = report.counts
    return (
        counts["dequantized"] > 0
        and not counts["converted"]
        and report.record_sha256 is None
        and Path(report.source).expanduser().is_dir()
    )


_METHODS = {
    "bytes": "Every byte is what the recorded recipe produces from the source.",
    "bounds": (
        "No usable moequant.json, so bytes were not compared: every weight is within the bounds "
        "of its format."
    ),
}


def _show(out: Output, report: Mapping[str, Any]) -> None:
    out.line(f"{report['converted']}: verified against {report['source']}")
    counts = report["counts"]
    out.line(
        f"{count(counts['converted'], 'weight')} converted, {counts['copied']} copied, "
        f"{size(counts['bytes'])}. {_METHODS[report['method']]}"
    )
    if report["quantizer"]:
        out.line(
            f"Converted again for the comparison by the {report['quantizer']['name']} quantizer."
        )
    if report["architecture_by"]:
        out.line(f"Architecture {report['architecture']}, from {report['architecture_by']}.")
    if counts["dequantized"]:
        out.line(f"{count(counts['dequantized'], 'weight')} dequantized to BF16.")
    if report["prepared"]:
        out.line(f"Prepared for {' and '.join(report['prepared'])}, with the same weights.")
    _table(
        out,
        report["formats"],
        {
            "format": "{0[format]}",
            ">weights": "{0[weights]}",
            ">SQNR": "{0[sqnr_db]:.2f} dB",
            ">error": "{0[relative_error]:.3%}",
            ">worst": "{0[worst][relative_error]:.3%}",
            "worst weight": "{0[worst][name]}",
        },
    )
    if report["requantization_errors"]:
        out.line()
        show_requantization_errors(out, report["requantization_errors"])
    _show_layers(out, report["layers"])


def _show_layers(out: Output, layers: Sequence[Mapping[str, Any]]) -> None:
    _table(
        out,
        layers,
        {
            ">layer": "{0[layer]}",
            "format": "{0[format]}",
            ">experts": "{0[experts]}",
            ">error": "{0[layer_error]:.3%}",
            ">with its activations": "{0[quantized_activations_error]:.3%}",
            ">runtime / bound": "{0[runtime_error]:.2g}",
        },
    )
    for layer in layers:
        if layer["activations_not_measured"] is not None:
            out.line(
                f"Layer {layer['layer']} with its activations ({layer['activations']}): not "
                f"measured, because {layer['activations_not_measured']}."
            )
    _table(
        out,
        [layer for layer in layers if layer["backend_error"] is not None],
        {
            ">layer": "{0[layer]}",
            "backend": "{0[backend]}",
            "device": "{0[device]}",
            ">off from the CPU reference": "{0[backend_error]:.3%}",
        },
    )


def _table(out: Output, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print a table, if it has rows; `columns` gives the template of cells by column title."""
    if rows:
        out.line()
        out.table([*columns], [[_cell(form, row) for form in columns.values()] for row in rows])


def _cell(form: str, row: Mapping[str, Any]) -> str:
    try:
        return form.format(row)
    except TypeError:  # a number that is None, such as the SQNR of a weight without error
        return "-"
