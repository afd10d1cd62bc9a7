"""convert(): the one function behind `moequant convert`."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moequant.checkpoint.source import INDEX_FILE, Checkpoint, locate
from moequant.conversion.commit import RECORD_FILE, commit
from moequant.conversion.journal import WORK_FOLDER, Journal
from moequant.conversion.plan import Plan, make_plan
from moequant.conversion.recipe import Recipe, load_recipe, parse_size
from moequant.conversion.run import write_shards
from moequant.errors import MoequantError, RecipeError, UnsupportedError
from moequant.progress import SilentProgress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.conversion.journal import FinishedShard
    from moequant.progress import Progress

DEFAULT_WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """What `convert` did.

    Attributes:
        output: where the result lies.
        plan: what was planned.
        state: "converted", "already converted" or, with `dry_run`, "planned".
        resumed_shards: finished shards an earlier, interrupted run had left.
    """

    output: Path
    plan: Plan
    state: Literal["converted", "already converted", "planned"]
    resumed_shards: int = 0


def convert(
    source: str | Path,
    output: str | Path,
    *,
    format: str | None = None,
    recipe: Recipe | str | Path | None = None,
    dialect: str | None = None,
    revision: str | None = None,
    workers: int = DEFAULT_WORKERS,
    max_shard_size: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionResult:
    """Convert a checkpoint's experts.

    The same call again continues an interrupted conversion, or finds it finished. The bytes
    written do not depend on `workers` nor on interruptions.

    Args:
        source: directory, or id of a repository on the Hugging Face hub.
        output: directory to write; created if need be.
        format: convert the routed experts, and nothing else, into this format.
        recipe: or a recipe: a `Recipe`, the name of one that comes with moequant, or a TOML file.
        dialect: overrides the recipe's and the format's own.
        revision: branch, tag or commit of a hub repository.
        workers: units converted at the same time.
        max_shard_size: for example "5GB".
        overwrite: replace what is in `output`; the old files stay until the new ones are whole.
        dry_run: plan only; reads headers and writes nothing.
        progress: told what is done.

    Raises:
        RecipeError: neither or both of `format` and `recipe`, or a recipe that does not fit.
        CheckpointError: the source is damaged, incomplete or contradicts itself.
        UnsupportedError: an architecture, a shape or a format and dialect we cannot do.
        MoequantError: `output` holds something else, or cannot be written.
    """
    chosen = _choose_recipe(format, recipe)
    path = locate(source, revision)
    checkpoint = Checkpoint.open(path)
    plan = plan_checkpoint(checkpoint, chosen, dialect=dialect, max_shard_size=max_shard_size)
    target = Path(output)
    if dry_run:
        return ConversionResult(output=target, plan=plan, state="planned")
    if plan.refusals:
        raise UnsupportedError("\n".join(plan.refusals))
    _check_apart(path, target)
    provenance = _provenance(source, path, revision)
    return _convert(
        checkpoint, plan, target, provenance, workers, overwrite, progress or SilentProgress()
    )


def plan_checkpoint(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    dialect: str | None = None,
    max_shard_size: str | None = None,
) -> Plan:
    """The plan for an opened checkpoint; see `make_plan`."""
    try:
        max_shard_bytes = parse_size(max_shard_size or recipe.output.max_shard_size)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return make_plan(
        checkpoint.tensors,
        checkpoint.config,
        checkpoint.file_bytes,
        recipe,
        dialect=dialect,
        max_shard_bytes=max_shard_bytes,
    )


def _convert(
    checkpoint: Checkpoint,
    plan: Plan,
    output: Path,
    provenance: Mapping[str, Any],
    workers: int,
    overwrite: bool,
    progress: Progress,
) -> ConversionResult:
    journal = Journal(output)
    _check_target(journal, plan, overwrite)
    with journal.lock():
        # Again, now that no other run can change what is here.
        if not _check_target(journal, plan, overwrite):
            shutil.rmtree(journal.folder)
            return ConversionResult(output=output, plan=plan, state="already converted")
        finished = _resume_or_begin(journal, plan, checkpoint, overwrite)
        resumed = len(finished)
        todo = [shard for shard in plan.shards if shard.file not in finished]
        _check_space(output, sum(shard.size_bytes for shard in todo))
        progress.start("converting", sum(shard.work_bytes for shard in todo))
        for shard in write_shards(
            checkpoint, plan, todo, journal, workers=workers, progress=progress
        ):
            finished[shard.file] = shard
        progress.finish()
        ordered = [finished[shard.file] for shard in plan.shards]
        commit(checkpoint, plan, journal, ordered, provenance)
    return ConversionResult(output=output, plan=plan, state="converted", resumed_shards=resumed)


def _resume_or_begin(
    journal: Journal, plan: Plan, checkpoint: Checkpoint, overwrite: bool
) -> dict[str, FinishedShard]:
    """Shards an earlier run of this plan has left; without such a run, a fresh work folder."""
    record: dict[str, Any] = {"plan_sha256": plan.digest, "source_state": checkpoint.file_state()}
    recorded = journal.read_plan()
    if recorded == record:
        return journal.finished()
    if journal.exists and not overwrite:
        changed = _changed_file(recorded.get("source_state"), record["source_state"])
        raise MoequantError(
            f"{checkpoint.path / changed}: changed since the conversion into {journal.output} "
            "began; start over with --overwrite"
        )
    journal.begin(record)
    return {}


def _changed_file(before: Any, now: Mapping[str, Any]) -> str:
    known = before if isinstance(before, dict) else {}
    return next((file for file, state in now.items() if known.get(file) != state), "")


def _check_target(journal: Journal, plan: Plan, overwrite: bool) -> bool:
    """Whether there is work to do; False if this very conversion is already finished.

    Raises:
        MoequantError: the directory holds something else, and `overwrite` was not given.
    """
    output = journal.output
    if output.exists() and not output.is_dir():
        raise MoequantError(f"{output}: is a file; name a directory to write into")
    if overwrite or not output.exists():
        return True
    if journal.exists:
        if journal.read_plan().get("plan_sha256") == plan.digest:
            return True
        raise MoequantError(
            f"{output}: holds an unfinished conversion with other settings or of another source; "
            "repeat its command to finish it, or start this one over with --overwrite"
        )
    if all(path.name == WORK_FOLDER for path in output.iterdir()):
        return True
    record = _read_record(output)
    if record.get("plan_sha256") != plan.digest:
        raise MoequantError(
            f"{output}: not empty, and not this conversion; choose another directory, or replace "
            "what is there with --overwrite"
        )
    _check_whole(output, record)
    return False


def _read_record(output: Path) -> dict[str, Any]:
    try:
        record = json.loads((output / RECORD_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _check_whole(output: Path, record: Mapping[str, Any]) -> None:
    """Refuse to call an output finished that lost a file since."""
    sizes = {file: entry["bytes"] for file, entry in record["shards"].items()}
    for file, size in {**sizes, INDEX_FILE: None, "config.json": None}.items():
        path = output / file
        if not path.is_file() or size not in (None, path.stat().st_size):
            raise MoequantError(
                f"{path}: missing or cut short since this conversion was finished; convert again "
                "with --overwrite"
            )


def _choose_recipe(format: str | None, recipe: Recipe | str | Path | None) -> Recipe:
    if (format is None) == (recipe is None):
        raise RecipeError("name either a format or a recipe")
    if format is not None:
        return Recipe.for_format(format)
    if isinstance(recipe, Recipe):
        return recipe
    assert recipe is not None
    return load_recipe(recipe)


def _check_apart(source: Path, output: Path) -> None:
    one, other = source.resolve(), output.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise MoequantError(
            f"{output}: lies in the source {source} or around it; choose a directory apart from it"
        )


def _check_space(output: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(output).free
    if free_bytes < needed_bytes:
        raise MoequantError(
            f"{output}: {free_bytes / 1e9:.1f} GB free, but {needed_bytes / 1e9:.1f} GB are still "
            "to be written; make room or choose another disk, then repeat the command"
        )


def _provenance(source: str | Path, path: Path, revision: str | None) -> dict[str, Any]:
    """Where the source came from; a directory's name says nothing that its contents do not."""
    if Path(source).expanduser().is_dir():
        return {}
    # A hub snapshot's folder is named after the commit.
    return {"repository": str(source), "revision": revision, "commit": path.name}
