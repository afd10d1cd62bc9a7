"""convert(), which `moequant convert` calls."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moequant.conversion.arguments import (
    CPU,
    LOCAL,
    check_deletable,
    check_device,
    choose_executor,
    choose_recipe,
    choose_scales,
)
from moequant.conversion.gptq_units import warnings_of_gpu
from moequant.conversion.journal import Journal
from moequant.conversion.keep_sensitive import parse_kept
from moequant.conversion.output_directory import check_apart, free_bytes
from moequant.conversion.plan_warnings import warnings_of_config
from moequant.conversion.planned_conversion import (
    ConversionResult,
    PlannedConversion,
    convert_planned,
    refusal_of_output,
)
from moequant.conversion.planner import Planner, without_collector
from moequant.conversion.record import copied_sidecars
from moequant.conversion.source_identity import source_digests
from moequant.cores import available_cores
from moequant.errors import ArgumentError, MoequantError
from moequant.models import read_architectures
from moequant.progress import SilentProgress
from moequant.quantizers import choose_quantizer
from moequant.statistics import Statistics
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.disk import explained
from moequant.storage.files import CONFIG_FILE, INDEX_FILE
from moequant.storage.folder import is_adapter
from moequant.storage.given_path import given_path
from moequant.storage.hub_folder import HubFolder, download_of, open_headers
from moequant.storage.locate import directory_of, locate
from moequant.weights.converted import described_architectures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from moequant.conversion.plan import Plan
    from moequant.conversion.recipe import Recipe
    from moequant.conversion.sensitivity import LayerCost
    from moequant.progress import Progress

DEFAULT_WORKERS = min(8, available_cores())


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
        ArgumentError: `workers` or `executor` is not as above; a revision of a directory; or a
            device or deletion that the executor or the source does not have.
        ArchitectureError: the file `architecture` is invalid.
        RecipeError: neither or both of `format` and `recipe`, or a recipe that does not fit.
        StatisticsError: the statistics or activation scales are damaged, of another model, or not
            used, or no scale can be made of them.
        CheckpointError: the source is damaged, incomplete or inconsistent.
        UnsupportedError: an unsupported architecture, shape, or format and dialect; the engine
            loads the output in no dialect; or a path that is neither a text nor a path.
        NumericsError: the format destroys a weight; see `moequant.conversion.error_limit`.
        MoequantError: `output` contains something else, or cannot be written.
    """
    if workers < 1:
        raise ArgumentError(f"workers = {workers}, but must be at least 1")
    wanted, scales = choose_scales(activation_scales)
    chosen = choose_recipe(format, options, recipe, wanted).with_output(
        dialect=dialect, max_shard_size=max_shard_size
    )
    check_device(device, chosen, executor)
    # All that can be refused now is: a download may take long.
    write = choose_executor(executor)
    if architecture is not None:
        read_architectures(architecture)
    measured = None if statistics is None else Statistics.load(statistics)
    sensitive = None if keep_sensitive is None else parse_kept(keep_sensitive, measured)
    target = given_path("output", output, what="a folder to write", error=MoequantError)
    if delete_source_shards:
        check_deletable(source, revision, executor, measured)
    # A cluster's machines open a directory, and statistics are compared with all weights first.
    streams = executor == LOCAL and measured is None
    path = None if dry_run or streams else locate(source, revision)
    with without_collector():
        checkpoint = open_headers(source, revision) if path is None else Checkpoint.open(path)
    if not dry_run:  # which reports it with the plan
        check_apart(checkpoint, target)
    own = described_architectures(checkpoint.path, architecture)
    planner = Planner(checkpoint=checkpoint, own=own, input_scales=scales)
    plan = planner.plan(chosen, measured, unused_statistics=sensitive is not None)
    if measured is not None and checkpoint.is_local:
        measured.check_measured_on(source_digests(checkpoint, ()))
    kept: tuple[LayerCost, ...] = ()
    if sensitive is not None:
        plan, kept = planner.keeping_sensitive(plan, sensitive, workers=workers, progress=progress)
    if engine is not None:
        plan = planner.for_engine(plan, engine)
    plan = replace(plan, warnings=(*plan.warnings, *_warnings(checkpoint, plan, device)))
    work = PlannedConversion(
        checkpoint=checkpoint,
        plan=plan,
        sidecars=_readable_sidecars(checkpoint, fetch=not dry_run),
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
        return _planned_only(work, target, kept)
    plan.check_accepted()
    with explained(target, "written"):
        return replace(convert_planned(work, workers, progress or SilentProgress()), kept=kept)


def _readable_sidecars(checkpoint: Checkpoint, *, fetch: bool) -> list[Path]:
    """The files beside the weights that are copied; read now, before anything is written."""
    sidecars = copied_sidecars(checkpoint)
    if fetch and isinstance(checkpoint.folder, HubFolder):
        checkpoint.folder.fetch(sidecars)
    for file in sidecars:
        checkpoint.folder.open(str(file)).read(0, 0)
    return sidecars


def _planned_only(
    work: PlannedConversion, target: Path, kept: tuple[LayerCost, ...]
) -> ConversionResult:
    """What a dry run returns."""
    plan, error = work.plan, refusal_of_output(work)
    quantizer = None
    if work.executor == LOCAL:
        quantizer = choose_quantizer([] if plan.refusals else plan.jobs())
    return ConversionResult(
        output=target,
        plan=plan,
        state="planned",
        kept=kept,
        refusals=plan.refusals if error is None else (*plan.refusals, str(error)),
        error=plan.refusal or error,
        download=download_of(work.checkpoint),
        free_bytes=free_bytes(target),
        quantizer=quantizer,
    )


def _warnings(checkpoint: Checkpoint, plan: Plan, device: str) -> Iterator[str]:
    """Those beside the plan's own."""
    yield from warnings_of_config(checkpoint.config, checkpoint.folder.shown / CONFIG_FILE)
    yield from _warnings_of_files(checkpoint)
    if device != CPU:
        yield from warnings_of_gpu(plan.units, device)
    if plan.statistics is not None and not checkpoint.is_local:
        yield (
            f"{plan.statistics.path}: whether it was measured on these weights is not checked, "
            "because that reads them; the conversion checks it"
        )


def _warnings_of_files(checkpoint: Checkpoint) -> Iterator[str]:
    left_out = checkpoint.left_out()
    adapters = ", ".join(str(file) for file in left_out if is_adapter(file))
    besides = [f for f in left_out if not is_adapter(f) and ".safetensors" in f.name.lower()]
    if besides:
        why = f"the weights are {', '.join(checkpoint.files)}"
        if checkpoint.index_file is not None:
            why = f"{INDEX_FILE} does not name them"
        yield f"not read and not copied, because {why}: {', '.join(map(str, besides))}"
    if others := ", ".join(str(f) for f in left_out if not is_adapter(f) and f not in besides):
        yield f"not read and not copied, because they hold the weights in other formats: {others}"
    if adapters:
        yield (
            f"not applied and not copied, because they are an adapter: {adapters}. If the model "
            "needs it, merge it into the weights first (merge_and_unload of peft)"
        )


def _provenance(source: str | Path, checkpoint: Checkpoint, revision: str | None) -> dict[str, Any]:
    """The hub origin of the source; empty for a directory, which is identified by its contents."""
    if directory_of(source, revision) is not None:
        return {}
    # A hub snapshot's folder is named after the commit.
    return {"repository": str(source), "revision": revision, "commit": checkpoint.path.name}
