"""convert(): the one function behind `moequant convert`."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moequant.conversion.commit import commit
from moequant.conversion.executors import LOCAL, choose_executor
from moequant.conversion.journal import Journal
from moequant.conversion.output_directory import (
    check_apart,
    check_places,
    check_space,
    is_work_left,
)
from moequant.conversion.plan import Plan, plan_checkpoint
from moequant.conversion.recipe import Recipe, load_recipe
from moequant.conversion.record import copied_sidecars
from moequant.conversion.requantization_error import RequantizationError, merged_errors
from moequant.conversion.source_identity import (
    check_unchanged,
    content_digests,
    source_digests,
    source_state,
)
from moequant.conversion.used_quantizer import Share, shares
from moequant.errors import (
    MoequantError,
    NonFiniteError,
    NumericsError,
    RecipeError,
    UnsupportedError,
)
from moequant.models import read_architectures
from moequant.progress import SilentProgress
from moequant.quantizers import choose_quantizer
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.disk import explained
from moequant.storage.files import CONFIG_FILE, INDEX_FILE, RECORD_FILE
from moequant.storage.folder import is_adapter
from moequant.storage.locate import locate
from moequant.storage.reader import FixedFile
from moequant.weights.converted import described_architectures
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_weights import PartInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from moequant.conversion.executors import WriteShards
    from moequant.conversion.journal import FinishedShard
    from moequant.progress import Progress
    from moequant.quantizers import Choice
    from moequant.storage.headers import TensorInfo

DEFAULT_WORKERS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """What `convert` did.

    Attributes:
        output: where the result lies.
        plan: what was planned.
        state: "converted", "already converted" or, with `dry_run`, "planned".
        resumed_shards: finished shards an earlier, interrupted run had left.
        refusals: with `dry_run`, why the conversion would be refused.
        error: with `dry_run`, what the conversion would raise; None if it would begin.
        quantizer: what quantizes on this machine, if that was asked for; None where nothing was to
            do here, as on a cluster.
        shares: which quantizer made which shards, those of earlier runs and of other machines too.
        requantization_errors: of a source that was quantized before, kind by kind.
    """

    output: Path
    plan: Plan = field(repr=False)
    state: Literal["converted", "already converted", "planned"]
    resumed_shards: int = 0
    refusals: tuple[str, ...] = ()
    error: MoequantError | None = None
    quantizer: Choice | None = None
    requantization_errors: tuple[RequantizationError, ...] = ()
    shares: tuple[Share, ...] = ()


def convert(
    source: str | Path,
    output: str | Path,
    *,
    format: str | None = None,
    recipe: Recipe | str | Path | None = None,
    dialect: str | None = None,
    architecture: str | Path | None = None,
    revision: str | None = None,
    workers: int = DEFAULT_WORKERS,
    max_shard_size: str | None = None,
    overwrite: bool = False,
    hash_source: bool = False,
    executor: str = LOCAL,
    dry_run: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], object] | None = None,
) -> ConversionResult:
    """Convert a checkpoint's experts.

    The same call again continues an interrupted conversion, or finds it finished. The bytes
    written do not depend on `workers` nor on interruptions.

    Args:
        source: directory, or id of a repository on the Hugging Face hub.
        output: directory to write; created if need be.
        format: convert the routed experts, and nothing else, into this format; or "bf16", which
            dequantizes every quantized weight of the source.
        recipe: or a recipe: a `Recipe`, the name of one that comes with moequant, or a TOML file.
        dialect: overrides the recipe's and the format's own.
        architecture: a TOML file that describes the source's architecture, in place of our table;
            what it says goes into moequant.json, so that nobody needs it again. Of a source that
            was converted itself, by default what its moequant.json says.
        revision: branch, tag or commit of a hub repository.
        workers: units converted at the same time.
        max_shard_size: for example "5GB".
        overwrite: replace what is in `output`; the old files stay until the new ones are whole.
        hash_source: record the SHA-256 of every weight file of the source; reads it once more.
        executor: where shards are written: "local", or "ray" or "ray:ADDRESS" for a cluster, whose
            machines share the file systems of source and output.
        dry_run: plan only; reads headers and writes nothing.
        progress: told what is done.
        on_plan: called with the plan, and its warnings, before anything is written.

    Raises:
        ArchitectureError: the file `architecture` is none.
        RecipeError: neither or both of `format` and `recipe`, or a recipe that does not fit.
        CheckpointError: the source is damaged, incomplete or contradicts itself.
        UnsupportedError: an architecture, a shape or a format and dialect we cannot do.
        NumericsError: the format destroys a weight; see `moequant.conversion.error_limit`.
        MoequantError: `output` holds something else, or cannot be written.
    """
    if workers < 1:
        raise MoequantError(f"workers = {workers}, but at least one has to do the work")
    chosen = _choose_recipe(format, recipe).with_output(
        dialect=dialect, max_shard_size=max_shard_size
    )
    if architecture is not None:
        read_architectures(architecture)  # now, for a download may take long
    path = locate(source, revision)
    with _without_collector():
        checkpoint = Checkpoint.open(path)
        own = described_architectures(path, architecture)
        plan = _mention_left_out(plan_checkpoint(checkpoint, chosen, own), checkpoint)
    # Now, so that a file that cannot come along is found before anything is written.
    sidecars = copied_sidecars(checkpoint)
    for file in sidecars:
        FixedFile.at(path / file).read(0, 0)
    target = _output_path(output)
    work = _Work(
        checkpoint=checkpoint,
        plan=plan,
        sidecars=sidecars,
        provenance=_provenance(source, path, revision),
        journal=Journal(target),
        overwrite=overwrite,
        hash_source=hash_source,
        executor=executor,
        write_shards=choose_executor(executor),
    )
    if on_plan is not None:
        on_plan(plan)
    if dry_run:
        error = _refusal_of_output(work)
        return ConversionResult(
            output=target,
            plan=plan,
            state="planned",
            refusals=plan.refusals if error is None else (*plan.refusals, str(error)),
            error=_refusal_of_plan(plan) or error,
            quantizer=None
            if executor != LOCAL
            else choose_quantizer([] if plan.refusals else plan.jobs()),
        )
    refusal = _refusal_of_plan(plan)
    if refusal is not None:
        raise refusal
    check_apart(checkpoint, target)
    with explained(target, "written"):
        return _convert(work, workers, progress or SilentProgress())


@contextmanager
def _without_collector() -> Iterator[None]:
    """A plan makes many objects and no garbage, which Python looks for again as they double.

    It takes a tenth of the time of a small plan, and two fifths of one of 50 000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _mention_left_out(plan: Plan, checkpoint: Checkpoint) -> Plan:
    left_out = checkpoint.left_out()
    adapters = ", ".join(str(file) for file in left_out if is_adapter(file))
    others = ", ".join(str(file) for file in left_out if not is_adapter(file))
    warnings = []
    if others:
        warnings.append(
            f"not read and not copied, for they are the weights in other forms: {others}"
        )
    if adapters:
        warnings.append(
            f"not applied and not copied, for they are an adapter: {adapters}. If the model needs "
            "it, merge it into the weights first (merge_and_unload of peft)"
        )
    return replace(plan, warnings=(*plan.warnings, *warnings))


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One conversion: what is read, what is planned, where it goes."""

    checkpoint: Checkpoint
    plan: Plan
    sidecars: list[Path]
    provenance: Mapping[str, Any]
    journal: Journal
    overwrite: bool
    hash_source: bool
    executor: str
    write_shards: WriteShards

    def files(self) -> list[str]:
        """Names of all files that the output will have."""
        shards = [shard.file for shard in self.plan.shards]
        return [*shards, *map(str, self.sidecars), RECORD_FILE, INDEX_FILE, CONFIG_FILE]

    def sidecar_bytes(self, state: Mapping[str, Sequence[int]]) -> int:
        """Bytes of the files that come along, by the state of the source."""
        return sum(state[str(file)][0] for file in self.sidecars)

    def is_left(self) -> bool:
        """Whether there is anything to do; see `is_work_left`."""
        return is_work_left(self.journal, self.plan.digest, self.digests, self.overwrite)

    def digests(self) -> dict[str, Any]:
        """Digests of the source's contents."""
        return source_digests(self.checkpoint, self.sidecars)


def _refusal_of_plan(plan: Plan) -> UnsupportedError | None:
    return UnsupportedError("\n".join(plan.refusals)) if plan.refusals else None


def _refusal_of_output(work: _Work) -> MoequantError | None:
    """Why the output directory would be refused; nothing is touched."""
    try:
        check_apart(work.checkpoint, work.journal.output)
        with explained(work.journal.output, "read"):
            if work.is_left():
                state = source_state(work.checkpoint, work.sidecars)
                # What is finished takes space that need not be found, all else gives it back.
                _check_room(work, state, {}, freed_bytes=work.journal.shard_bytes())
    except MoequantError as error:
        return error
    return None


def _output_path(output: str | Path) -> Path:
    if "\0" in str(output):
        raise MoequantError(f"{output!r}: no path; it holds a NUL character")
    # Not Path.expanduser, which raises for ~ of an unknown user.
    return Path(os.path.expanduser(output))  # noqa: PTH111


def _convert(work: _Work, workers: int, progress: Progress) -> ConversionResult:
    plan, journal = work.plan, work.journal
    result = partial(ConversionResult, output=journal.output, plan=plan)
    # A work folder beside a finished output was left by a run killed in its last moment.
    if not work.is_left() and not journal.folder.exists():
        return result(state="already converted")
    with journal.lock():
        # Again, now that no other run can change what is here.
        if not work.is_left():
            journal.close()
            return result(state="already converted")
        state = source_state(work.checkpoint, work.sidecars)
        finished = _resume_or_begin(work, state, progress)
        resumed = len(finished)
        todo = [shard for shard in plan.shards if shard.file not in finished]
        progress.start("converting", sum(shard.work_bytes for shard in todo))
        chosen = choose_quantizer(plan.jobs())
        with _saying_where(work), ThreadPoolExecutor(1, "moequant-sample") as beside:
            digests = beside.submit(work.digests)
            for shard in work.write_shards(
                work.checkpoint,
                plan,
                todo,
                journal,
                choice=chosen,
                workers=workers,
                progress=progress,
            ):
                finished[shard.file] = shard
        progress.finish()
        ordered = [finished[shard.file] for shard in plan.shards]
        provenance = {**work.provenance, **digests.result()}
        if work.hash_source:
            provenance |= content_digests(work.checkpoint, workers, progress)
        check_unchanged(work.checkpoint, state)
        commit(work.checkpoint, plan, journal, ordered, provenance)
    errors = tuple(
        merged_errors(error for shard in ordered for error in shard.requantization_errors)
    )
    return result(
        state="converted",
        resumed_shards=resumed,
        quantizer=chosen if work.executor == LOCAL else None,
        requantization_errors=errors,
        shares=tuple(shares({s.file: s.quantizer for s in ordered})),
    )


@contextmanager
def _saying_where(work: _Work) -> Iterator[None]:
    """Say of a weight that cannot be converted which file has it, and how to go on."""
    try:
        yield
    except NumericsError as error:
        name = str(error).partition(": ")[0]
        raise NumericsError(
            f"{error}, and start over with --overwrite{_where(work, name)}"
        ) from error
    except NonFiniteError as error:
        # From a worker of a cluster only the message comes back; it begins with the name.
        name = str(error).partition(": ")[0]
        again = f"{error}, then start over with --overwrite"
        raise NonFiniteError(f"{again}{_where(work, name)}") from error


def _where(work: _Work, name: str) -> str:
    """A sentence on the tensors of the source that hold a weight; nothing if none is known."""
    path, weight = work.checkpoint.path, work.plan.source.weights.get(name)
    parts: tuple[TensorInfo, ...]
    match weight:
        case None:
            return ""
        case PartInfo():
            parts = (work.checkpoint.info(weight.place.tensor),)
        case EncodedInfo():
            parts = weight.parts
        case _:
            return f". It is in {path / weight.file}"
    return f". It is in {' and '.join(f'{part.name} of {path / part.file}' for part in parts)}"


def _resume_or_begin(
    work: _Work, state: Mapping[str, Any], progress: Progress
) -> dict[str, FinishedShard]:
    """Shards an earlier run of this plan has left; without such a run, a fresh work folder.

    Refuses an output without room or place for what is to be written.
    """
    journal = work.journal
    record = {"plan_sha256": work.plan.digest, "source_state": state}
    recorded = journal.read_plan()
    if record.items() <= recorded.items():
        finished = journal.resume([shard.file for shard in work.plan.shards], progress)
        _check_room(work, state, finished, freed_bytes=0)
        return finished
    if journal.exists and not work.overwrite:
        changed = _changed_file(recorded.get("source_state"), state)
        raise MoequantError(
            f"{work.checkpoint.path / changed}: changed since the conversion into {journal.output} "
            "began; start over with --overwrite"
        )
    # First: a plan beside an earlier output would make an unfinished one of it.
    try:
        _check_room(work, state, {}, freed_bytes=journal.shard_bytes())
    except MoequantError:
        if not journal.exists:
            journal.close()  # it holds the lock and nothing else
        raise
    journal.begin({**record, "recipe": work.plan.recipe.model_dump(mode="json")})
    return {}


def _check_room(
    work: _Work,
    state: Mapping[str, Sequence[int]],
    finished: Collection[str],
    *,
    freed_bytes: int,
) -> None:
    """Refuse what has no place or no room in the output; `freed_bytes` are given back there."""
    output = work.journal.output
    check_places(output, work.files())
    shards = sum(s.size_bytes for s in work.plan.shards if s.file not in finished)
    check_space(output, shards + work.sidecar_bytes(state) - freed_bytes)


def _changed_file(before: Any, now: Mapping[str, Any]) -> str:
    known = before if isinstance(before, dict) else {}
    return next((file for file, state in now.items() if known.get(file) != state), "")


def _choose_recipe(format: str | None, recipe: Recipe | str | Path | None) -> Recipe:
    if (format is None) == (recipe is None):
        raise RecipeError("name either a format or a recipe")
    if format is not None:
        return Recipe.for_format(format)
    if isinstance(recipe, Recipe):
        return recipe
    assert recipe is not None
    return load_recipe(recipe)


def _provenance(source: str | Path, path: Path, revision: str | None) -> dict[str, Any]:
    """Where the source came from; a directory's name says nothing that its contents do not."""
    if Path(source).expanduser().is_dir():
        return {}
    # A hub snapshot's folder is named after the commit.
    return {"repository": str(source), "revision": revision, "commit": path.name}
