"""moequant push CONVERTED REPO_ID: publish a checkpoint on the hub, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moequant.cli import options
from moequant.cli.failures import InterruptedWork
from moequant.cli.output import Output, count, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.publishing import PublishedFile, PushResult

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    "push",
    short_help="Publish a verified checkpoint on the Hugging Face hub.",
    epilog=options.examples(
        "moequant push qwen3-nvfp4 me/Qwen3-30B-A3B-NVFP4 --dry-run",
        "moequant push qwen3-nvfp4 me/Qwen3-30B-A3B-NVFP4 --private",
    ),
)
@click.argument("converted", type=options.DIRECTORY)
@click.argument("repo_id", metavar="REPO_ID")
@click.option("--revision", metavar="BRANCH", help="Branch to publish in; created if missing.")
@click.option(
    "--private",
    is_flag=True,
    help="Create the repository as a private one; refuse one that exists and is public.",
)
@click.option(
    "--base-model",
    metavar="REPO_ID",
    help="The source on the hub, for the model card.  [default: what was converted]",
)
@click.option(
    "--quality",
    type=_FILE,
    metavar="FILE",
    help="Figures for the model card, as `moequant evaluate --json` prints them.",
)
@click.option(
    "--report",
    type=_FILE,
    metavar="FILE",
    help="A page of `moequant report` about it, to publish beside the card, which shows its "
    "pictures.",
)
@click.option(
    "--picture",
    "pictures",
    type=_FILE,
    multiple=True,
    metavar="FILE",
    help="A picture for the model card (PNG, JPEG or SVG). May be given several times.",
)
@click.option("--include-prepared", is_flag=True, help="Publish prepared folders, too.")
@click.option(
    "--force", is_flag=True, help="Publish it even if it was not verified; the card says so."
)
@click.option(
    "--overwrite", is_flag=True, help="Remove another checkpoint's files from the repository."
)
@click.option(
    "--dry-run", is_flag=True, help="Print files and the model card; upload nothing, ask no hub."
)
@options.workers_option
@options.json_option
@options.quiet_option
def command(
    converted: str,
    repo_id: str,
    pictures: tuple[Path, ...],
    dry_run: bool,
    workers: int | None,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Publish CONVERTED as REPO_ID, owner/name, with a model card around the source's own.

    CONVERTED must have passed `moequant verify CONVERTED --against SOURCE`. The same command
    continues an interrupted upload. A token that may write is taken from `hf auth login` or
    HF_TOKEN.
    """
    out = Output(as_json=as_json, quiet=quiet)
    if workers is not None:
        settings["workers"] = workers
    try:
        with out.progress() as progress:
            from moequant.publishing import push

            result = push(
                converted,
                repo_id,
                pictures=pictures,
                dry_run=dry_run,
                progress=progress,
                **settings,
            )
    except KeyboardInterrupt:
        raise InterruptedWork from None
    out.warn(*result.plan.warnings)
    if result.plan.not_verified and not dry_run:
        out.warn(f"published unverified: {result.plan.not_verified}")
    out.result(_describe(result), _show_plan if dry_run else _show)


def _describe(result: PushResult) -> dict[str, Any]:
    plan = result.plan
    return {
        "state": "planned" if result.url is None else "published",
        "path": str(plan.path),
        "repository": plan.repo_id,
        "revision": plan.revision,
        "url": result.url,
        "verified": plan.not_verified is None,
        "not_verified": plan.not_verified,
        "bytes": plan.size_bytes,
        "files": [_describe_file(file) for file in (*plan.files, *plan.extras)],
        "left_out": list(plan.left_out),
        "sent": list(result.sent),
        "removed": list(result.removed),
        "warnings": list(plan.warnings),
        "card": plan.card,
    }


def _describe_file(file: PublishedFile) -> dict[str, Any]:
    return {"name": file.name, "bytes": file.size_bytes, "sha256": file.sha256}


def _show_plan(out: Output, result: Mapping[str, Any]) -> None:
    branch = f", branch {result['revision']}" if result["revision"] else ""
    out.fields(
        {
            "checkpoint": result["path"],
            "repository": f"{result['repository']}{branch}",
            "verified": "yes; a push first compares every file with moequant.json"
            if result["verified"]
            else f"no: {result['not_verified']}",
            "size": f"{size(result['bytes'])} in {count(len(result['files']), 'file')}",
            "left out": ", ".join(result["left_out"]) or "nothing",
        }
    )
    out.line()
    out.table(["file", ">size"], [(f["name"], size(f["bytes"])) for f in result["files"]])
    out.line()
    out.line("README.md, the model card:")
    out.line()
    out.line(result["card"].rstrip())


def _show(out: Output, result: Mapping[str, Any]) -> None:
    sizes = {file["name"]: file["bytes"] for file in result["files"]}
    sent = sum(sizes[name] for name in result["sent"])
    if not result["sent"]:
        out.line(f"{result['url']}: already there, {size(result['bytes'])}")
        return
    out.line(
        f"{result['url']}: {count(len(result['sent']), 'file')} of {len(sizes)} sent, {size(sent)} "
        f"of {size(result['bytes'])}"
    )
    if result["removed"]:
        out.line(f"Removed there: {', '.join(result['removed'])}")
