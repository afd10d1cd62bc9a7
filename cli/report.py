"""moequant report CONVERTED... [--against SOURCE] [-o report.html]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from moequant.cli import options
from moequant.cli.failures import FailedResult
from moequant.cli.output import Output, count, size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@click.command(
    "report",
    short_help="Write one page about converted checkpoints.",
    epilog=options.examples(
        "moequant report qwen3-nvfp4 --against Qwen/Qwen3-30B-A3B",
        "moequant report qwen3-nvfp4 qwen3-mxfp4 -o both.html",
    ),
)
@click.argument("converted", nargs=-1, required=True, type=options.DIRECTORY)
@click.option(
    "--against", type=options.DIRECTORY, metavar="SOURCE",
    help="Verify them: the checkpoint they were converted from, a directory or a hub repository.",
)  # fmt: skip
@options.results_option(
    "--verified", name="verified",
    help="What `moequant verify --against SOURCE --json` printed, instead of verifying again.",
)  # fmt: skip
@options.results_option(
    "--evaluation", name="evaluations", help="What `moequant evaluate --json` printed."
)
@options.results_option(
    "--conversion", name="conversions",
    help="What `moequant convert --json` printed: time and memory.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=options.FILE, metavar="FILE.html",
    callback=options.check_page, default="report.html", show_default=True,
    help="The page to write; one that is there is replaced.",
)  # fmt: skip
@options.revision_option
@options.recorded_architecture_option
@click.option(
    "--statistics", type=options.FILE, metavar="STATS",
    help="Statistics to show; needed to verify what was made with them.",
)  # fmt: skip
@options.recorded_activation_scales_option
@options.layers_option
@options.workers_option
@options.json_option
@options.quiet_option
def command(
    converted: tuple[str, ...],
    against: str | None,
    output: Path,
    revision: str | None,
    layers: Literal["all"] | int | None,
    workers: int | None,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Write a page about CONVERTED: errors, sizes, engines, quality, and how it was made.

    Several outputs are shown side by side. With --against, they are verified; without it, their
    files are compared with their moequant.json, and the page says what was not measured. The exit
    code is 5, and the page is written, if a check fails.
    """
    out = Output(as_json=as_json, quiet=quiet)
    needing = {"--revision": revision, "--layers": layers}
    for flag, value in needing.items():
        if against is None and value is not None:
            raise click.UsageError(f"{flag} needs --against")
    if workers is not None:
        settings["workers"] = workers
    from moequant.errors import NumericsError
    from moequant.reporting import make_report
    from moequant.storage.disk import replace_file

    with out.progress() as progress:
        report = make_report(
            converted, against=against, revision=revision, layers=layers, progress=progress,
            **settings,
        )  # fmt: skip
    page = report.to_html().encode()
    replace_file(output, page)
    document = {**report.to_json(), "page": str(output), "page_bytes": len(page)}
    if report.problem_count:
        raise FailedResult(NumericsError(_explain(document)), document)
    out.result(document, _show)


_VERDICTS = {
    "faulty": "faulty",
    "verified": "verified",
    "verified_earlier": "verified earlier, not compared since",
    "unchanged": "unchanged since it was written, not compared with its source",
    "unchecked": "not checked",
}


def _show(out: Output, document: Mapping[str, Any]) -> None:
    out.table(["output", "verdict"], _verdicts(document))
    missing = len(document["not_measured"])
    out.line()
    out.line(
        f"{document['page']}: {size(document['page_bytes'])}"
        + (f"; {count(missing, 'thing')} not measured, which it lists" if missing else "")
    )


def _verdicts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(one["name"], _VERDICTS[one["verdict"]]) for one in document["outputs"]]


def _explain(document: Mapping[str, Any]) -> str:
    """The first problem of each faulty output, and where all of them are."""
    faulty = [one for one in document["outputs"] if one["problem_count"]]
    lines = [
        f"  {one['name']}: {count(one['problem_count'], 'problem')}, such as "
        f"{one['problems'][0]['name']}: {one['problems'][0]['message']}"
        for one in faulty
    ]
    headline = f"{len(faulty)} of {count(len(document['outputs']), 'output')} failed a check"
    return "\n".join([headline, *lines, f"{document['page']} lists the problems"])
