"""Run a model over data, one layer in memory at a time, and write what its experts multiply."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moequant._version import __version__
from moequant.calibration.accumulate import LayerAccumulator, SecondMoments
from moequant.calibration.data import read_data
from moequant.calibration.memory import HESSIAN_ROWS_BYTES, memory_of
from moequant.calibration.work_folder import EMBEDDING, WorkFolder
from moequant.conversion import copied_sidecars
from moequant.conversion.source_identity import source_digests, source_state
from moequant.device import usable_device
from moequant.errors import DataError, MoequantError, UnsupportedError
from moequant.integrations.expert_inputs import ExpertInputs
from moequant.integrations.layerwise import LayerwiseModel
from moequant.integrations.tokenizer import vocabulary_size
from moequant.models import ROUTED_EXPERTS
from moequant.progress import SilentProgress
from moequant.statistics import PRIOR_TOKENS, Statistics, StatisticsRecord, StatisticsWriter
from moequant.statistics.record import digest_names, moments_digest
from moequant.statistics.tensors import all_specs
from moequant.storage.given_path import given_path
from moequant.storage.headers import bit_count
from moequant.storage.locate import locate
from moequant.streaming.compute import DTYPES, dtype_name_for, facts_of_run
from moequant.streaming.deterministic import deterministic
from moequant.streaming.layers import DEFAULT_BATCH_TOKENS, embed_batches, run_layer
from moequant.streaming.source import open_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch import Tensor

    from moequant.calibration.data import CalibrationData
    from moequant.calibration.memory import CalibrationMemory
    from moequant.progress import Progress
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.source_model import SourceModel

DEFAULT_TOKENS = 65_536
DEFAULT_WINDOW_TOKENS = 512
_MTP = "mtp"
"""The role of what architectures.toml names of multi-token prediction."""


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """What a calibration will do.

    Attributes:
        output: the file of statistics.
        record: what it will say of itself, without digests.
        last_layer: the last layer that is run; none with experts comes after it.
        uncalibrated: layers for multi-token prediction that the checkpoint has, with experts.
            transformers has no modules to run them with.
        kept_tensors: how many tensors of multi-token prediction the checkpoint has beside these
            layers' own, such as `mtp.*`; they are not run either, and `convert` keeps them.
        memory: what it takes, in addition to the interpreter and libraries.
        disk_bytes: of the file, and of activations while it is written.
    """

    output: Path
    record: StatisticsRecord
    last_layer: int
    uncalibrated: tuple[int, ...]
    kept_tensors: int
    memory: CalibrationMemory
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """What a calibration did.

    Attributes:
        plan: what was to be done.
        state: "planned" after a dry run, "calibrated", or "already calibrated".
        resumed_layers: layers that an earlier run had finished.
        statistics: the file; None after a dry run.
        seconds: how long it took.
    """

    plan: CalibrationPlan
    state: str
    resumed_layers: int
    statistics: Statistics | None
    seconds: float


def calibrate(
    source: str | Path,
    data: str | Path,
    output: str | Path,
    *,
    tokens: int = DEFAULT_TOKENS,
    window_tokens: int = DEFAULT_WINDOW_TOKENS,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    device: str = "cpu",
    dtype: str | None = None,
    hessian: bool = False,
    prior_tokens: int = PRIOR_TOKENS,
    architecture: str | Path | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[CalibrationPlan], None] | None = None,
) -> CalibrationResult:
    """Measure what the routed experts of a model multiply, over text or token ids.

    One layer is in memory at a time. What layers return is kept on the disk, beside the output, in
    a folder from which a run that was killed continues to the same bytes.

    Args:
        source: a directory, or the id of a repository on the hub; quantized or not.
        data: text, or a dataset: see `moequant.calibration.data`.
        output: the file of statistics to write.
        tokens: at most so many are run, in whole windows from all of the data.
        window_tokens: length of the longest window.
        batch_tokens: tokens that run through a layer at once, in whole windows.
        device: to compute on.
        dtype: to compute in: float32 or bfloat16; by default float32 on a CPU, else bfloat16.
        hessian: also record second moments, for GPTQ.
        prior_tokens: what the statistics of a layer count for in those of an expert.
        architecture: a file that describes the model, instead of the built-in table.
        revision: of a source on the hub.
        overwrite: replace an existing output, or an unfinished one with other settings.
        dry_run: only plan.
        progress: receives the progress, in tokens.
        on_plan: called with the plan before the work starts.

    Raises:
        MoequantError: the output exists and is of other settings, is what is read here, or cannot
            be written.
        CheckpointError: the source is damaged or incomplete, or changes.
        UnsupportedError: transformers has no class for the model, or one whose layers or experts
            cannot be run one by one; a device that cannot be used; or a path that is neither a text
            nor a path.
        DataError: the data cannot be used.
        StatisticsError: the model computes NaN.
    """
    started = time.monotonic()
    run = _Calibration.prepare(
        source=locate(source, revision),
        data_file=given_path("data", data, what="text or a dataset", error=DataError),
        output=given_path("output", output, what="the file to write", error=MoequantError),
        tokens=tokens,
        window_tokens=window_tokens,
        batch_tokens=batch_tokens,
        device=usable_device(device),
        dtype=dtype,
        hessian=hessian,
        prior_tokens=prior_tokens,
        architecture=architecture,
    )
    if on_plan is not None:
        on_plan(run.plan)
    resumed, found = 0, None
    state = "planned"
    if not dry_run:
        found = run.existing(overwrite=overwrite)
        state = "already calibrated"
        if found is None:
            with deterministic(run.model.device):
                resumed = run.run(progress or SilentProgress(), overwrite=overwrite)
            found, state = Statistics.load(run.plan.output), "calibrated"
    return CalibrationResult(
        plan=run.plan,
        state=state,
        resumed_layers=resumed,
        statistics=found,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True, kw_only=True)
class _Calibration:
    """One calibration: a model, data, and a plan."""

    checkpoint: Checkpoint
    model: LayerwiseModel
    data: CalibrationData
    plan: CalibrationPlan
    batch_tokens: int

    @classmethod
    def prepare(
        cls,
        *,
        source: Path,
        data_file: Path,
        output: Path,
        tokens: int,
        window_tokens: int,
        batch_tokens: int,
        device: torch.device,
        dtype: str | None,
        hessian: bool,
        prior_tokens: int,
        architecture: str | Path | None,
    ) -> _Calibration:
        """Read headers, config.json and data, and plan."""
        checkpoint, found = open_source(source, architecture)
        _check_apart(output, data_file, checkpoint)
        if not _sparse_layers(found):
            raise UnsupportedError(
                f"{source}: no layer with experts; there is nothing to calibrate"
            )
        used = dtype_name_for(dtype, device)
        model = LayerwiseModel(checkpoint, found, dtype=DTYPES[used], device=device)
        data = read_data(
            data_file,
            folder=source,
            vocabulary=vocabulary_size(checkpoint.config, source),
            tokens=tokens,
            window_tokens=window_tokens,
            batch_tokens=batch_tokens,
        )
        record = _record(checkpoint, found, data, facts_of_run(device, used), hessian, prior_tokens)
        last = record.layers[-1]
        kept = 3 * data.record.tokens * record.hidden * model.dtype.itemsize
        plan = CalibrationPlan(
            output=output,
            record=record,
            last_layer=last,
            uncalibrated=_uncalibrated_layers(found),
            kept_tensors=sum(role.role == _MTP for role in found.model.roles.values()),
            memory=memory_of(model, data, record, range(last + 1)),
            disk_bytes=_file_bytes(record) + kept,
        )
        return cls(
            checkpoint=checkpoint, model=model, data=data, plan=plan, batch_tokens=batch_tokens
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the bytes of the output."""
        record = self.plan.record.model_dump(mode="json", exclude={"digests"})
        state = source_state(self.checkpoint, ())
        return {**record, "batch_tokens": self.batch_tokens, "source_files": state}

    def existing(self, *, overwrite: bool) -> Statistics | None:
        """The output, if it is there already with these settings.

        Raises:
            MoequantError: it is there with others, or is something else.
        """
        output = self.plan.output
        if overwrite or not output.exists():
            return None
        advice = "choose another output, or replace it with --overwrite (overwrite=True)"
        try:
            found = Statistics.load(output)
        except MoequantError as error:
            raise MoequantError(f"{output}: exists and is no statistics: {error}; {advice}") from (
                error
            )
        if found.record.model_dump(exclude={"digests"}) != self.plan.record.model_dump(
            exclude={"digests"}
        ):
            raise MoequantError(f"{output}: exists, from other data or settings; {advice}")
        folder = WorkFolder(output)
        if folder.exists:  # of a run that was killed after it had written the file
            with folder.lock():
                folder.remove()
        return found

    def run(self, progress: Progress, *, overwrite: bool) -> int:
        """Run all layers that are not finished; returns how many were."""
        folder = WorkFolder(self.plan.output)
        with folder.lock():
            folder.open(self.settings, overwrite=overwrite)
            record = self.plan.record
            names = digest_names(record.layers, hessian=record.hessian)
            if folder.digests.keys() == {*names} and not folder.statistics.exists():
                # A run was killed after it had written the output, which is gone since.
                folder.begin(self.settings)
            finished = folder.finished
            self._check_finished(folder)
            self.model.load_rest()
            layers = range(0 if finished is None else finished + 1, self.plan.last_layer + 1)
            progress.start("calibrating", len(layers) * self.data.record.tokens, unit="tokens")
            if finished is None:
                self._embed(folder)
            with StatisticsWriter(folder.statistics, record, folder.digests) as writer:
                for layer in layers:
                    self._run_layer(layer, folder, writer, progress)
                writer.finish(self.plan.output, {name: folder.digests[name] for name in names})
            folder.remove()
        progress.finish()
        return layers.start

    def _check_finished(self, folder: WorkFolder) -> None:
        """Check that a folder has the digests of the layers that it calls finished."""
        record, last = self.plan.record, self.plan.last_layer
        finished = EMBEDDING if folder.finished is None else folder.finished
        layers = tuple(layer for layer in record.layers if layer <= finished)
        wanted = digest_names(layers, hessian=record.hessian)
        if not EMBEDDING <= finished <= last or folder.digests.keys() != {*wanted}:
            raise MoequantError(
                f"{folder.path}: progress.json calls layers up to {finished} finished, with "
                f"digests of {len(folder.digests)}, but there are {last + 1} layers, and "
                f"{len(wanted)} digests are wanted; remove {folder.path} to start over"
            )

    def _embed(self, folder: WorkFolder) -> None:
        embed_batches(self.model, self.data.batches, folder.activations(EMBEDDING))
        folder.finish(EMBEDDING, {})

    def _run_layer(
        self, index: int, folder: WorkFolder, writer: StatisticsWriter, progress: Progress
    ) -> None:
        """Run all batches through a layer, and write what it returns and what its experts saw."""
        record = self.plan.record
        sums = LayerAccumulator(record, index, self.model.device)
        moments = SecondMoments(writer, index, HESSIAN_ROWS_BYTES) if record.hessian else None

        def observe(name: str, expert: int, rows: Tensor) -> None:
            sums.add(name, expert, rows)
            if moments is not None:
                moments.add(name, expert, rows)

        def after_batch(ids: Tensor) -> None:
            if moments is not None:
                moments.flush_if_full()
            progress.advance(ids.numel(), f"layer {index + 1}/{self.plan.last_layer + 1}")

        parameters = self.model.expert_parameters(index)
        with (
            self.model.layer(index) as layer,
            ExpertInputs(layer, parameters, experts=record.experts, observe=observe),
        ):
            run_layer(
                self.model,
                index,
                self.data.batches,
                embedded=folder.activations(EMBEDDING),
                before=folder.activations(index - 1) if index else None,
                returned=folder.activations(index),
                after_batch=after_batch,
            )
        digests = {}
        if index in record.layers:
            found = sums.finish()
            digests[str(index)] = writer.write_layer(index, found.to_tensors(index))
            if moments is not None:
                digests[moments_digest(index)] = moments.finish(found.tokens)
        folder.finish(index, digests)


def _check_apart(output: Path, data: Path, checkpoint: Checkpoint) -> None:
    """Check that the output would replace neither the data nor a file of the source."""
    files = [data, *(checkpoint.path / name for name in (*checkpoint.file_bytes, "config.json"))]
    for file in files:
        if output.exists() and file.exists() and output.samefile(file):
            raise MoequantError(
                f"{output}: this calibration reads it; choose another output for the statistics"
            )


def _sparse_layers(source: SourceModel) -> tuple[int, ...]:
    """The layers with experts that a forward runs, without multi-token prediction."""
    model = source.model
    return tuple(layer for layer in model.layers if layer in model.moe.sparse_layers)


def _uncalibrated_layers(source: SourceModel) -> tuple[int, ...]:
    """The layers for multi-token prediction whose experts are in the checkpoint."""
    optional = source.model.moe.optional_layers
    held = {role.layer for role in source.model.roles.values() if role.role == ROUTED_EXPERTS}
    return tuple(layer for layer in optional if layer in held)


def _record(
    checkpoint: Checkpoint,
    source: SourceModel,
    data: CalibrationData,
    run: dict[str, str],
    hessian: bool,
    prior_tokens: int,
) -> StatisticsRecord:
    moe, layers = source.model.moe, _sparse_layers(source)
    return StatisticsRecord(
        moequant=__version__,
        source=source_digests(checkpoint, copied_sidecars(checkpoint)),
        model_type=checkpoint.config["model_type"],
        architecture=source.model.architecture.name,
        experts=moe.experts,
        top_k=moe.top_k,
        hidden=moe.hidden,
        intermediate=moe.intermediate,
        layers=layers,
        prior_tokens=prior_tokens,
        hessian=hessian,
        data=data.record,
        run=run,
        digests=dict.fromkeys(digest_names(layers, hessian=hessian), "0" * 64),
    )


def _file_bytes(record: StatisticsRecord) -> int:
    return sum(bit_count(dtype, shape) // 8 for _, dtype, shape in all_specs(record))
