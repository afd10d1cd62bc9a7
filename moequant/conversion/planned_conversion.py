"""One conversion after it was planned: begun or resumed, its source read, its shards written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from moequant.conversion.arguments import LOCAL
from moequant.conversion.commit import commit
from moequant.conversion.finished_shard import Share, shares
from moequant.conversion.items import stored_in
from moequant.conversion.merging import merged_errors
from moequant.conversion.output_directory import (
    check_apart,
    check_nothing_stays,
    check_places,
    check_space,
    is_work_left,
)
from moequant.conversion.settings import settings_of
from moequant.conversion.source_identity import (
    check_unchanged,
    content_digests,
    source_digests,
    source_state,
)
from moequant.conversion.streaming import Stream, kept_bytes, remove_fetched
from moequant.errors import MoequantError, NonFiniteError, NumericsError
from moequant.quantizers import choose_quantizer
from moequant.storage.disk import existing_parent, explained
from moequant.storage.documents import object_at
from moequant.storage.files import CONFIG_FILE, INDEX_FILE, RECORD_FILE
from moequant.storage.headers import TensorInfo
from moequant.storage.hub_folder import Download, check_cache_space, download_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from moequant.conversion.arguments import WriteShards
    from moequant.conversion.finished_shard import FinishedShard
    from moequant.conversion.gptq_errors import GptqError
    from moequant.conversion.journal import Journal
    from moequant.conversion.plan import Plan
    from moequant.conversion.requantization_error import RequantizationError
    from moequant.conversion.sensitivity import LayerCost
    from moequant.conversion.shards import PlannedShard
    from moequant.progress import Progress
    from moequant.quantizers import Choice
    from moequant.storage.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """The result of `convert`.

    Attributes:
        output: the output directory.
        plan: the plan.
        state: "converted", "already converted" or, with `dry_run`, "planned".
        resumed_shards: number of shards that an earlier, interrupted run had finished.
        refusals: with `dry_run`, why the conversion would be refused.
        error: with `dry_run`, the error that the conversion would raise; None if there is none.
        download: with `dry_run`, what it takes to download a source on the hub; None for others.
        fetched_bytes: size of the source's shards that were fetched from the hub meanwhile.
        free_bytes: with `dry_run`, free space on the disk of `output`.
        quantizer: the quantizer of this machine; None if it had nothing to do, as with a cluster.
        kept: the layers that `keep_sensitive` chose, those that cost most first.
        shares: the shards by quantizer, including those of earlier runs and other machines.
        requantization_errors: for a quantized source, the errors by kind of weight.
        gptq_errors: for weights rounded by GPTQ, the errors of outputs by kind of weight.
        not_finite: the copied tensors that hold NaN or Inf, each with the first one, in words, if
            the state is "converted".
    """

    output: Path
    plan: Plan = field(repr=False)
    state: Literal["converted", "already converted", "planned"]
    resumed_shards: int = 0
    refusals: tuple[str, ...] = ()
    error: MoequantError | None = None
    download: Download | None = None
    free_bytes: int | None = None
    fetched_bytes: int = 0
    quantizer: Choice | None = None
    requantization_errors: tuple[RequantizationError, ...] = ()
    gptq_errors: tuple[GptqError, ...] = ()
    not_finite: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()
    kept: tuple[LayerCost, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedConversion:
    """One conversion: source, plan and output."""

    checkpoint: Checkpoint
    plan: Plan
    sidecars: list[Path]
    provenance: Mapping[str, Any]
    journal: Journal
    overwrite: bool
    hash_source: bool
    executor: str
    device: str
    write_shards: WriteShards
    delete_source_shards: bool

    @property
    def is_streamed(self) -> bool:
        """Whether weights of the source are still on the hub."""
        return not self.checkpoint.is_local

    def is_left(self) -> bool:
        """Whether there is anything to do; see `is_work_left`."""
        return is_work_left(
            self.journal,
            self.plan.digest,
            settings=settings_of(self.plan),
            state=partial(source_state, self.checkpoint, self.sidecars),
            source=self.identity,
            overwrite=self.overwrite,
        )

    def identity(self) -> Mapping[str, Any]:
        """What a record says of the source: digests of its contents, or its commit on the hub."""
        if self.is_streamed:
            return {key: self.provenance[key] for key in ("repository", "commit")}
        return source_digests(self.checkpoint, self.sidecars)

    @property
    def fetched_bytes(self) -> int:
        """Space on the output's disk that shards of the source take while they are converted."""
        return kept_bytes(self.checkpoint) if self.delete_source_shards else 0


def refusal_of_output(work: PlannedConversion) -> MoequantError | None:
    """Why the output directory would be refused; changes nothing."""
    try:
        check_apart(work.checkpoint, work.journal.output)
        with explained(work.journal.output, "read"):
            if work.is_left():
                state = source_state(work.checkpoint, work.sidecars)
                # Finished shards need no more space, and all other files are removed.
                _check_room(work, state, {}, freed_bytes=work.journal.shard_bytes())
    except MoequantError as error:
        return error
    return None


def convert_planned(work: PlannedConversion, workers: int, progress: Progress) -> ConversionResult:
    """Convert what is left to do, by `workers` threads; raises as `convert`."""
    plan, journal = work.plan, work.journal
    result = partial(ConversionResult, output=journal.output, plan=plan)
    # A run that was killed at its very end leaves a work folder in a finished output.
    if not work.is_left() and not journal.folder.exists():
        return result(state="already converted")
    with journal.lock():
        # Check again under the lock, when no other run can change the output.
        if not work.is_left():
            journal.close()
            return result(state="already converted")
        state = source_state(work.checkpoint, work.sidecars)
        remove_fetched(journal, keep_samples=work.delete_source_shards)
        finished = _resume_or_begin(work, state, progress)
        resumed = len(finished)
        todo = [shard for shard in plan.shards if shard.file not in finished]
        progress.start("converting", sum(shard.work_bytes for shard in todo))
        chosen = choose_quantizer(plan.jobs())
        with _saying_where(work), _reading(work, todo, workers, progress) as reading:
            for shard in reading.write_shards(
                reading.checkpoint,
                plan,
                reading.todo,
                journal,
                choice=chosen,
                workers=workers,
                progress=progress,
                device=work.device,
            ):
                finished[shard.file] = shard
            progress.finish()
            digests = reading.digests()
        ordered = [finished[shard.file] for shard in plan.shards]
        provenance = {**work.provenance, **digests}
        check_unchanged(work.checkpoint, state)
        commit(work.checkpoint, plan, journal, ordered, provenance)
    errors = tuple(
        merged_errors(error for shard in ordered for error in shard.requantization_errors)
    )
    return result(
        state="converted",
        resumed_shards=resumed,
        fetched_bytes=sum(f.size_bytes for f in work.checkpoint.files.values() if not f.is_local),
        quantizer=chosen if work.executor == LOCAL else None,
        requantization_errors=errors,
        gptq_errors=tuple(merged_errors(error for shard in ordered for error in shard.gptq_errors)),
        not_finite=tuple(fault for shard in ordered for fault in shard.not_finite),
        shares=tuple(shares(ordered)),
    )


class _Reading(NamedTuple):
    """How a conversion reads its source and writes shards, and the digests for the record."""

    checkpoint: Checkpoint
    todo: Sequence[PlannedShard]
    write_shards: WriteShards
    digests: Callable[[], Mapping[str, Any]]


@contextmanager
def _reading(
    work: PlannedConversion, todo: Sequence[PlannedShard], workers: int, progress: Progress
) -> Iterator[_Reading]:
    """Take samples of a source on disk beside the conversion; or fetch one on the hub meanwhile."""
    settings: dict[str, Any] = {"workers": workers, "progress": progress}
    if work.is_streamed:
        stream = Stream(work.checkpoint, todo, work.journal, delete=work.delete_source_shards)
        digests = partial(stream.digests, work.sidecars, hash_source=work.hash_source, **settings)
        write = partial(work.write_shards, on_done=stream.finished)
        with stream.running():
            yield _Reading(stream.checkpoint, stream.todo, write, digests)
        return
    with ThreadPoolExecutor(1, "moequant-sample") as beside:
        sampled = beside.submit(source_digests, work.checkpoint, work.sidecars)

        def all_digests() -> Mapping[str, Any]:
            contents = content_digests(work.checkpoint, **settings) if work.hash_source else {}
            return {**sampled.result(), **contents}

        yield _Reading(work.checkpoint, todo, work.write_shards, all_digests)


@contextmanager
def _saying_where(work: PlannedConversion) -> Iterator[None]:
    """Add to the error of a weight which file has it, and what to do."""
    try:
        yield
    except (NumericsError, NonFiniteError) as error:
        # A cluster's worker returns only the message, which begins with the weight's name.
        name = str(error).partition(": ")[0]
        then = "and" if isinstance(error, NumericsError) else "then"
        raise type(error)(
            f"{error}, {then} start over with --overwrite (overwrite=True){_where(work, name)}"
        ) from error


def _where(work: PlannedConversion, name: str) -> str:
    """A sentence about the source tensors of a weight; empty if they are unknown."""
    path, weight = work.checkpoint.folder.shown, work.plan.source.weights.get(name)
    if weight is None:
        return ""
    if isinstance(weight, TensorInfo):
        return f". It is in {path / weight.file}"
    parts = stored_in(weight, work.checkpoint.tensors)
    return f". It is in {' and '.join(f'{part.name} of {path / part.file}' for part in parts)}"


def _resume_or_begin(
    work: PlannedConversion, state: Mapping[str, Any], progress: Progress
) -> dict[str, FinishedShard]:
    """The finished shards of an earlier run of this plan; without one, a new work folder.

    Refuses an output without enough space, or with something in the way.
    """
    journal = work.journal
    record = {"plan_sha256": work.plan.digest, "source_state": state}
    commit = {"commit": work.provenance["commit"]} if work.provenance else {}
    recorded = _recorded_plan(work)
    if record.items() <= recorded.items():
        finished = journal.resume([shard.file for shard in work.plan.shards], progress)
        _check_room(work, state, finished, freed_bytes=0)
        return finished
    if journal.exists and not work.overwrite:
        known = object_at(recorded, "source_state")
        changed = next((file for file, now in state.items() if known.get(file) != now), "")
        begun = recorded.get("commit")
        instead = f"continue with --revision {begun}, or " if isinstance(begun, str) else ""
        raise MoequantError(
            f"{work.checkpoint.folder.shown / changed}: changed since the conversion into "
            f"{journal.output} began; {instead}start over with --overwrite "
            "(overwrite=True)"
        )
    # Check first: a plan next to an earlier output would mark that output as unfinished.
    try:
        _check_room(work, state, {}, freed_bytes=journal.shard_bytes())
    except MoequantError:
        if not journal.exists:
            journal.close()  # it contains only the lock
        raise
    journal.begin({**record, **settings_of(work.plan), **commit})
    return {}


def _recorded_plan(work: PlannedConversion) -> Mapping[str, Any]:
    """The plan of an unfinished conversion; empty if there is none, or a damaged one to replace."""
    try:
        return work.journal.read_plan() if work.journal.exists else {}
    except MoequantError:
        if not work.overwrite:
            raise
        return {}


def _check_room(
    work: PlannedConversion,
    state: Mapping[str, Sequence[int]],
    finished: Collection[str],
    *,
    freed_bytes: int,
) -> None:
    """Check the output's files, and its space, of which `freed_bytes` will be freed."""
    output, shards = work.journal.output, work.plan.shards
    sidecars = [str(file) for file in work.sidecars]
    files = [shard.file for shard in shards]
    check_places(output, [*files, *sidecars, RECORD_FILE, INDEX_FILE, CONFIG_FILE])
    check_nothing_stays(output, sidecars)
    shard_bytes = sum(shard.size_bytes for shard in shards if shard.file not in finished)
    sidecar_bytes = sum(state[file][0] for file in sidecars)
    needed_bytes = shard_bytes + sidecar_bytes + work.fetched_bytes - freed_bytes
    download = None if work.delete_source_shards else download_of(work.checkpoint)
    if download is not None:
        check_cache_space(download)
        places = (existing_parent(path).stat() for path in (download.cache, output))
        if len({place.st_dev for place in places}) == 1:
            needed_bytes += download.left_bytes
    check_space(output, needed_bytes)
