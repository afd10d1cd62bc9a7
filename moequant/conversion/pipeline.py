"""convert(), which `moequant convert` calls."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from moequant.conversion.commit import commit
from moequant.conversion.engine_dialect import plan_for_engine
from moequant.conversion.finished_shard import Share, shares
from moequant.conversion.gptq_units import warnings_of_gpu
from moequant.conversion.items import stored_in
from moequant.conversion.journal import Journal
from moequant.conversion.keep_sensitive import parse_kept, sensitive_layers
from moequant.conversion.merging import merged_errors
from moequant.conversion.output_directory import (
    check_apart,
    check_places,
    check_space,
    free_bytes,
    is_work_left,
)
from moequant.conversion.plan import Plan, plan_checkpoint
from moequant.conversion.recipe import (
    FROM_FILE,
    FROM_STATISTICS,
    KEEP,
    Recipe,
    load_recipe,
    parse_activation_scales,
)
from moequant.conversion.record import copied_sidecars
from moequant.conversion.run import write_shards
from moequant.conversion.source_identity import (
    check_unchanged,
    content_digests,
    source_digests,
    source_state,
)
from moequant.conversion.streaming import Stream, kept_bytes, remove_fetched
from moequant.cores import available_cores
from moequant.device import usable_device
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
from moequant.statistics import InputScales, Statistics
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.disk import existing_parent, explained
from moequant.storage.files import CONFIG_FILE, INDEX_FILE, RECORD_FILE
from moequant.storage.folder import given_folder, is_adapter
from moequant.storage.headers import TensorInfo
from moequant.storage.hub_folder import (
    Download,
    HubFolder,
    check_cache_space,
    download_of,
    open_headers,
)
from moequant.storage.locate import directory_of, locate
from moequant.weights.converted import described_architectures

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from moequant.conversion.finished_shard import FinishedShard
    from moequant.conversion.gptq_errors import GptqError
    from moequant.conversion.requantization_error import RequantizationError
    from moequant.conversion.sensitivity import LayerCost
    from moequant.conversion.shards import PlannedShard
    from moequant.progress import Progress
    from moequant.quantizers import Choice

    WriteShards = Callable[..., Iterator[FinishedShard]]

CPU = "cpu"
LOCAL = "local"
RAY = "ray"
DEFAULT_WORKERS = min(8, available_cores())


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
    shares: tuple[Share, ...] = ()
    kept: tuple[LayerCost, ...] = ()


def convert(
    source: str | Path,
    output: str | Path,
    *,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    recipe: Recipe | str | Path | None = None,
    dialect: str | None = None,
    engine: str | None = None,
    architecture: str | Path | None = None,
    statistics: str | Path | None = None,
    activation_scales: str | Path | float | None = None,
    keep_sensitive: str | int | None = None,
    revision: str | None = None,
    workers: int = DEFAULT_WORKERS,
    max_shard_size: str | None = None,
    overwrite: bool = False,
    hash_source: bool = False,
    executor: str = LOCAL,
    device: str = CPU,
    dry_run: bool = False,
    delete_source_shards: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], object] | None = None,
) -> ConversionResult:
    """Convert a checkpoint's experts.

    The same call again continues an interrupted conversion. The bytes written do not depend on
    `workers` or on interruptions.

    Args:
        source: directory, or id of a repository on the Hugging Face hub.
        output: directory to write; created if missing.
        format: convert only the routed experts into this format; "bf16" dequantizes every
            quantized weight of the source.
        options: values of the format's options, such as {"rounding": "gptq"}; in a recipe, each
            rule names its own.
        recipe: instead of a format: a `Recipe`, the name of a shipped one, or a TOML file.
        dialect: overrides the dialect of the recipe or format.
        engine: "vllm", "sglang" or "transformers": where it does not load the default dialect, the
            output is in the first dialect that it loads, which the plan's warnings say.
        architecture: a TOML file that describes the source's architecture, used instead of the
            built-in table and recorded in moequant.json. The default for a converted source is the
            description in its moequant.json.
        statistics: a file that `moequant calibrate` wrote for this source. With it, scales of
            routed experts are chosen by errors weighted with the mean square of each input channel,
            unless the recipe names another search; its second moments are what GPTQ needs.
        activation_scales: where static scales of the experts' inputs come from, with a `format`
            that has them: "statistics", a number, or a file (`InputScales`). With a recipe, the
            file for its rules that say "file".
        keep_sensitive: keep the routed experts of the layers that cost most when they are quantized
            (`moequant.conversion.sensitivity`): a number of layers, or a size such as "2GB", by
            which the output may grow. Needs `statistics`.
        revision: branch, tag or commit of a hub repository.
        workers: number of units converted in parallel.
        max_shard_size: for example "5GB".
        overwrite: replace an existing output; the old files stay until the new ones are complete.
        hash_source: record the SHA-256 of every weight file of the source, which reads it twice.
        executor: "local", or "ray" or "ray:ADDRESS" for a cluster, whose machines share the file
            systems of source and output.
        device: where GPTQ computes, such as "cuda"; all else is as fast on the CPU.
        dry_run: only plan; reads headers and writes nothing.
        delete_source_shards: fetch the shards of a hub repository into the output's work folder,
            and delete each when it is converted. Shards in the hub's cache are read there and kept.
        progress: receives the progress.
        on_plan: called with the plan and its warnings before anything is written.

    Raises:
        ArchitectureError: the file `architecture` is invalid.
        RecipeError: neither or both of `format` and `recipe`, or a recipe that does not fit.
        StatisticsError: the statistics or activation scales are damaged, of another model, or not
            used, or no scale can be made of them.
        CheckpointError: the source is damaged, incomplete or inconsistent.
        UnsupportedError: an unsupported architecture, shape, or format and dialect; or the engine
            loads the output in no dialect.
        NumericsError: the format destroys a weight; see `moequant.conversion.error_limit`.
        MoequantError: `output` contains something else, or cannot be written.
    """
    if workers < 1:
        raise MoequantError(f"workers = {workers}, but must be at least 1")
    wanted, scales = _choose_scales(activation_scales)
    chosen = _choose_recipe(format, options, recipe, wanted).with_output(
        dialect=dialect, max_shard_size=max_shard_size
    )
    check_device(device, chosen, executor)
    # All that can be refused now is: a download may take long.
    write = choose_executor(executor)
    if architecture is not None:
        read_architectures(architecture)
    measured = None if statistics is None else Statistics.load(statistics)
    sensitive = None if keep_sensitive is None else parse_kept(keep_sensitive, measured)
    target = given_folder("output", output, what="a folder to write", error=MoequantError)
    if delete_source_shards:
        _check_deletable(source, revision, executor, measured)
    # A cluster's machines open a directory, and statistics are compared with all weights first.
    streams = executor == LOCAL and measured is None
    path = None if dry_run or streams else locate(source, revision)
    with _without_collector():
        checkpoint = open_headers(source, revision) if path is None else Checkpoint.open(path)
        if not dry_run:  # which reports it with the plan
            check_apart(checkpoint, target)
        own = described_architectures(checkpoint.path, architecture)
        plan = plan_checkpoint(
            checkpoint, chosen, own, measured, scales, unused_statistics=sensitive is not None
        )
    if measured is not None and checkpoint.is_local:
        measured.check_measured_on(source_digests(checkpoint, ()))
    kept: tuple[LayerCost, ...] = ()
    if sensitive is not None:
        if (refusal := _refusal_of_plan(plan)) is not None:
            raise refusal
        kept = sensitive_layers(checkpoint, plan, sensitive, workers=workers, progress=progress)
        chosen = chosen.keeping(one.layer for one in kept)
        with _without_collector():
            plan = plan_checkpoint(
                checkpoint, chosen, own, measured, scales, unused_statistics=True
            )
            if not plan.needs_statistics:
                # They chose the layers, which the recipe names now, and decide nothing else.
                measured = None
                plan = plan_checkpoint(checkpoint, chosen, own, measured, scales)
    if engine is not None:
        with _without_collector():
            plan = plan_for_engine(
                plan,
                engine,
                lambda recipe: plan_checkpoint(checkpoint, recipe, own, measured, scales),
            )
    plan = replace(plan, warnings=(*plan.warnings, *_warnings_of_files(checkpoint)))
    if device != CPU:
        plan = replace(plan, warnings=(*plan.warnings, *warnings_of_gpu(plan.units, device)))
    if measured is not None and not checkpoint.is_local:
        plan = replace(plan, warnings=(*plan.warnings, _statistics_not_compared(measured)))
    # Now, so that a file that cannot be copied is found before anything is written.
    sidecars = copied_sidecars(checkpoint)
    if not dry_run and isinstance(checkpoint.folder, HubFolder):
        checkpoint.folder.fetch(sidecars)
    for file in sidecars:
        checkpoint.folder.open(str(file)).read(0, 0)
    work = _Work(
        checkpoint=checkpoint,
        plan=plan,
        sidecars=sidecars,
        provenance=_provenance(source, checkpoint, revision),
        journal=Journal(target),
        overwrite=overwrite,
        hash_source=hash_source,
        executor=executor,
        device=device,
        write_shards=write,
        delete_source_shards=delete_source_shards,
    )
    if on_plan is not None:
        on_plan(plan)
    if dry_run:
        error = _refusal_of_output(work)
        return ConversionResult(
            output=target,
            plan=plan,
            state="planned",
            kept=kept,
            refusals=plan.refusals if error is None else (*plan.refusals, str(error)),
            error=_refusal_of_plan(plan) or error,
            download=download_of(checkpoint),
            free_bytes=free_bytes(target),
            quantizer=None
            if executor != LOCAL
            else choose_quantizer([] if plan.refusals else plan.jobs()),
        )
    if (refusal := _refusal_of_plan(plan)) is not None:
        raise refusal
    with explained(target, "written"):
        return replace(_convert(work, workers, progress or SilentProgress()), kept=kept)


def check_device(device: str, recipe: Recipe, executor: str) -> None:
    """Check that a device other than the CPU can be used and has something to do.

    Raises:
        UnsupportedError: the device cannot be used, or not by a cluster.
        RecipeError: nothing is rounded by GPTQ.
    """
    if device == CPU:
        return
    if executor != LOCAL:
        raise UnsupportedError(
            f"device {device} with executor {executor}, but machines of a cluster compute GPTQ on "
            "their CPUs; leave out one of the two"
        )
    if not any(rule.format != KEEP and rule.rounding is not None for rule in recipe.rules):
        raise RecipeError(
            f"device {device} is where GPTQ computes, but nothing is rounded by GPTQ; leave it "
            'out, or give the option rounding = "gptq"'
        )
    if (kind := usable_device(device).type) != "cuda":
        raise UnsupportedError(
            f"device {device} is of type {kind}, but GPTQ computes on cpu or cuda; give one of them"
        )


def choose_executor(text: str) -> WriteShards:
    """The function that writes shards, for "local", "ray" or "ray:ADDRESS"; see `run.write_shards`.

    Raises:
        UnsupportedError: an unknown executor, or Ray is not installed.
    """
    name, colon, address = text.partition(":")
    if text == LOCAL:
        return write_shards
    if name != RAY or (colon and not address):
        raise UnsupportedError(
            f"executor {text!r}, but must be {LOCAL}, {RAY} or {RAY}:ADDRESS, such as "
            f"{RAY}:10.0.0.1:6379 or {RAY}:auto"
        )
    try:
        from moequant.conversion.cluster import write_shards_on_ray
    except ImportError as error:
        raise UnsupportedError(
            f"executor {text!r}: Ray cannot be imported here ({error}); install it with "
            "pip install 'moequant[ray]'"
        ) from error
    return partial(write_shards_on_ray, address=address or None)


def _check_deletable(
    source: str | Path, revision: str | None, executor: str, statistics: Statistics | None
) -> None:
    """Check that shards of the source can be fetched and deleted one after the other."""
    if directory_of(source, revision) is not None:
        raise UnsupportedError(
            f"{source}: a directory, but only shards that the conversion itself fetches from the "
            "hub are deleted; leave --delete-source-shards out, or give a hub repo id"
        )
    if executor != LOCAL:
        raise UnsupportedError(
            f"executor {executor!r}: its machines read the whole source; leave out --executor or "
            "--delete-source-shards"
        )
    if statistics is not None:
        raise UnsupportedError(
            f"{statistics.path}: statistics are compared with all weights of the source before the "
            "conversion begins; leave out --statistics or --delete-source-shards"
        )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable Python's garbage collector: a plan creates many objects but no garbage.

    The collector takes a tenth of the time of a small plan, and 40 % with 50 000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _warnings_of_files(checkpoint: Checkpoint) -> Iterator[str]:
    left_out = checkpoint.left_out()
    adapters = ", ".join(str(file) for file in left_out if is_adapter(file))
    if others := ", ".join(str(file) for file in left_out if not is_adapter(file)):
        yield f"not read and not copied, because they hold the weights in other formats: {others}"
    if adapters:
        yield (
            f"not applied and not copied, because they are an adapter: {adapters}. If the model "
            "needs it, merge it into the weights first (merge_and_unload of peft)"
        )


def _statistics_not_compared(statistics: Statistics) -> str:
    return (
        f"{statistics.path}: whether it was measured on these weights is not checked, because that "
        "reads them; the conversion checks it"
    )


@dataclass(frozen=True, kw_only=True)
class _Work:
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
        return is_work_left(self.journal, self.plan.digest, self.identity, self.overwrite)

    def identity(self) -> Mapping[str, Any]:
        """What a record says of the source: digests of its contents, or its commit on the hub."""
        if self.is_streamed:
            return {key: self.provenance[key] for key in ("repository", "commit")}
        return source_digests(self.checkpoint, self.sidecars)

    @property
    def fetched_bytes(self) -> int:
        """Space on the output's disk that shards of the source take while they are converted."""
        return kept_bytes(self.checkpoint) if self.delete_source_shards else 0


def _refusal_of_plan(plan: Plan) -> UnsupportedError | None:
    return UnsupportedError("\n".join(plan.refusals)) if plan.refusals else None


def _refusal_of_output(work: _Work) -> MoequantError | None:
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


def _convert(work: _Work, workers: int, progress: Progress) -> ConversionResult:
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
    work: _Work, todo: Sequence[PlannedShard], workers: int, progress: Progress
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
def _saying_where(work: _Work) -> Iterator[None]:
    """Add to the error of a weight which file has it, and what to do."""
    try:
        yield
    except (NumericsError, NonFiniteError) as error:
        # A cluster's worker returns only the message, which begins with the weight's name.
        name = str(error).partition(": ")[0]
        then = "and" if isinstance(error, NumericsError) else "then"
        raise type(error)(
            f"{error}, {then} start over with --overwrite{_where(work, name)}"
        ) from error


def _where(work: _Work, name: str) -> str:
    """A sentence about the source tensors of a weight; empty if they are unknown."""
    path, weight = work.checkpoint.folder.shown, work.plan.source.weights.get(name)
    if weight is None:
        return ""
    if isinstance(weight, TensorInfo):
        return f". It is in {path / weight.file}"
    parts = stored_in(weight, work.checkpoint.tensors)
    return f". It is in {' and '.join(f'{part.name} of {path / part.file}' for part in parts)}"


def _resume_or_begin(
    work: _Work, state: Mapping[str, Any], progress: Progress
) -> dict[str, FinishedShard]:
    """The finished shards of an earlier run of this plan; without one, a new work folder.

    Refuses an output without enough space, or with something in the way.
    """
    journal = work.journal
    record = {"plan_sha256": work.plan.digest, "source_state": state}
    measured = work.plan.statistics
    commit = {"commit": work.provenance["commit"]} if work.provenance else {}
    used = {} if measured is None else {"statistics": {"sha256": measured.digest}}
    recorded = journal.read_plan()
    if record.items() <= recorded.items():
        finished = journal.resume([shard.file for shard in work.plan.shards], progress)
        _check_room(work, state, finished, freed_bytes=0)
        return finished
    if journal.exists and not work.overwrite:
        before = recorded.get("source_state")
        known = before if isinstance(before, dict) else {}
        changed = next((file for file, now in state.items() if known.get(file) != now), "")
        begun = recorded.get("commit")
        instead = f"continue with --revision {begun}, or " if isinstance(begun, str) else ""
        raise MoequantError(
            f"{work.checkpoint.folder.shown / changed}: changed since the conversion into "
            f"{journal.output} began; {instead}start over with --overwrite"
        )
    # Check first: a plan next to an earlier output would mark that output as unfinished.
    try:
        _check_room(work, state, {}, freed_bytes=journal.shard_bytes())
    except MoequantError:
        if not journal.exists:
            journal.close()  # it contains only the lock
        raise
    journal.begin({**record, "recipe": work.plan.recipe.model_dump(mode="json"), **used, **commit})
    return {}


def _check_room(
    work: _Work,
    state: Mapping[str, Sequence[int]],
    finished: Collection[str],
    *,
    freed_bytes: int,
) -> None:
    """Check paths and space, of which `freed_bytes` will be freed, for output and download."""
    output, shards = work.journal.output, work.plan.shards
    sidecars = [str(file) for file in work.sidecars]
    files = [shard.file for shard in shards]
    check_places(output, [*files, *sidecars, RECORD_FILE, INDEX_FILE, CONFIG_FILE])
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


def _choose_recipe(
    format: str | None,
    options: Mapping[str, str] | None,
    recipe: Recipe | str | Path | None,
    activation_scales: str | float | None,
) -> Recipe:
    if (format is None) == (recipe is None):
        both = "" if format is None else ", not both"
        raise RecipeError(f"give a format or a recipe{both}")
    if format is not None:
        return Recipe.for_format(format, options, activation_scales)
    if options:
        raise RecipeError(
            f"options {', '.join(options)} are given beside a recipe, whose rules name their own; "
            "write them into the rules of the recipe"
        )
    if activation_scales not in (None, FROM_FILE):
        raise RecipeError(
            f"activation scales {activation_scales!r} beside a recipe, whose rules say where they "
            f'come from (activation_scales); give only the file for rules with "{FROM_FILE}"'
        )
    if isinstance(recipe, Recipe):
        return recipe
    assert recipe is not None
    return load_recipe(recipe)


def _choose_scales(
    given: str | Path | float | None,
) -> tuple[str | float | None, InputScales | None]:
    """What a rule's `activation_scales` is, and the file of scales, if it is one.

    Raises:
        RecipeError: a number that no static scale may be.
        StatisticsError: as `InputScales.load`.
    """
    if given is None or given == FROM_STATISTICS:
        return FROM_STATISTICS if given else None, None
    with suppress(ValueError):
        given = float(given) if isinstance(given, str) else given
    if isinstance(given, int | float):
        try:
            return parse_activation_scales(given), None
        except ValueError as error:
            raise RecipeError(f"activation scales: {error}") from None
    return FROM_FILE, InputScales.load(given)


def _provenance(source: str | Path, checkpoint: Checkpoint, revision: str | None) -> dict[str, Any]:
    """The hub origin of the source; empty for a directory, which is identified by its contents."""
    if directory_of(source, revision) is not None:
        return {}
    # A hub snapshot's folder is named after the commit.
    return {"repository": str(source), "revision": revision, "commit": checkpoint.path.name}
