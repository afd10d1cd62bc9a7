"""verify(), which `moequant verify` calls."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moequant.conversion import (
    DEFAULT_WORKERS,
    UsedQuantizer,
    check_recorded_statistics,
    quantizer_jobs,
)
from moequant.errors import ArchitectureError, ArgumentError, UnsupportedError
from moequant.models import read_architectures, recorded_architectures
from moequant.progress import SilentProgress
from moequant.quantizers import choose_quantizer
from moequant.quantizers.worker_pool import worker_pool
from moequant.statistics import InputScales, Statistics
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.files import RECORD_FILE
from moequant.storage.locate import locate
from moequant.verification.expectation import Verification, expect_by_config, expect_by_record
from moequant.verification.findings import Findings
from moequant.verification.layer_batch import experts_run
from moequant.verification.layers import (
    DEFAULT_LAYERS,
    check_layers,
    choose_layers,
    converted_layers,
)
from moequant.verification.prepared import check_prepared
from moequant.verification.reference import FUNCTIONS
from moequant.verification.report import Report
from moequant.verification.serving import serving_on
from moequant.verification.stored import existing_directory, read_stored
from moequant.verification.structure import check_shards, check_sidecars, check_structure
from moequant.verification.verified import digests_of
from moequant.verification.weights import check_weights
from moequant.weights.converted import ConvertedCheckpoint
from moequant.weights.source_model import read_source, source_config

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from moequant.models import Architecture, Model
    from moequant.progress import Progress
    from moequant.verification.layers import Layers
    from moequant.verification.serving import Serving
    from moequant.verification.stored import StoredCheckpoint


def verify(
    converted: str | Path,
    *,
    against: str | Path,
    revision: str | None = None,
    architecture: str | Path | None = None,
    statistics: str | Path | None = None,
    activation_scales: str | Path | None = None,
    layers: Layers = DEFAULT_LAYERS,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    workers: int = DEFAULT_WORKERS,
    progress: Progress | None = None,
) -> Report:
    """Check a converted checkpoint against its source.

    The checkpoint is read from disk, through its dialect, as an engine would read it. Every fault
    becomes a problem in the report.

    Args:
        converted: directory of the converted checkpoint, by moequant or another tool.
        against: the source: a directory, or id of a repository on the Hugging Face hub.
        revision: branch, tag or commit of a hub repository.
        architecture: a TOML file that describes the source's architecture. The default is the
            description in moequant.json, which the report names, then the built-in table.
        statistics: the file of statistics that it was converted with, if with any.
        activation_scales: the file of activation scales that it was converted with, if with one.
        layers: how many expert layers to run, spread evenly, or "all"; the default of three means
            the first, a middle one and the last.
        device: where these layers also run, besides the CPU reference.
        backend: name of the backend that runs them there; the default is the best on `device`,
            which on the CPU is the reference itself.
        workers: number of units compared in parallel.
        progress: receives the progress.

    Raises:
        ArgumentError: `layers` or `workers` is not as above; a device or backend for no layer; a
            revision of a directory; or the source is `converted` itself.
        ArchitectureError: the file `architecture` is invalid.
        StatisticsError: the statistics or activation scales are missing, damaged, or not those in
            moequant.json.
        CheckpointError: the source is damaged, incomplete or inconsistent; there is no directory
            `converted`, or its conversion is unfinished; or a file cannot be read or changes.
        UnsupportedError: an unsupported architecture or source dtype; no such device or backend
            here, or one that does not run the layers; or a path that is neither a text nor a path.
    """
    _check_arguments(layers, workers)
    serving = serving_on(device, backend, runs_layers=layers != 0)
    given = () if architecture is None else read_architectures(architecture)
    measured = None if statistics is None else Statistics.load(statistics)
    scales = None if activation_scales is None else InputScales.load(activation_scales)
    path = existing_directory(converted)
    source = Checkpoint.open(locate(against, revision, argument="against"))
    if source.path.resolve() == path.resolve():
        raise ArgumentError(
            f"{against}: the checkpoint itself; name the one that it was converted from"
        )
    findings = Findings()
    # Before anything is checked: what changes meanwhile then has another digest than these.
    record_sha256, manifests = digests_of(path)
    stored = read_stored(path, findings)
    check_recorded_statistics(stored.record or {}, measured, path, scales)
    own = given or _recorded_architectures(stored, findings)
    with source.naming_config():
        original = read_source(source.tensors, source_config(source), own)
    if layers != 0:
        _check_functions(source, original.model)
    check_sidecars(source, path, findings, by_moequant=stored.has_record)
    expected = None
    if stored.record is not None:
        check_shards(path, stored.record, findings)
        expected = expect_by_record(source, stored.record, own, findings, measured, scales)
    if expected is None:
        expected = expect_by_config(source, original, stored.checkpoint, findings)
    tensors = stored.checkpoint.tensors
    report = Report(
        converted=str(converted),
        source=str(against),
        architecture=original.model.architecture.name,
        architecture_by=original.model.architecture.origin,
        record_sha256=record_sha256,
        manifests_sha256=manifests,
        counts={
            "tensors": len(tensors),
            "bytes": sum(info.size_bytes for info in tensors.values()),
            "copied": 0,
            "dequantized": 0,
            "converted": 0,
        },
    )
    if expected is not None:
        check_structure(stored, expected, findings)
        with worker_pool(workers) as pool:
            run = Verification(
                source=source,
                stored=stored,
                expected=expected,
                pool=pool,
                progress=progress or SilentProgress(),
                findings=findings,
            )
            report = _compare(run, report, layers, serving)
    return replace(report, problems=tuple(findings.problems), problem_count=findings.count)


def _check_arguments(layers: Layers, workers: int) -> None:
    if workers < 1:
        raise ArgumentError(f"workers = {workers}, but must be at least 1")
    if layers != "all" and not (isinstance(layers, int) and layers >= 0):
        raise ArgumentError(f'layers = {layers!r}, but must be a number of layers or "all"')


def _recorded_architectures(
    stored: StoredCheckpoint, findings: Findings
) -> tuple[Architecture, ...]:
    """The architecture that moequant.json describes; a problem if it cannot be read."""
    definition = (stored.record or {}).get("architecture_definition")
    try:
        return recorded_architectures(definition, RECORD_FILE)
    except ArchitectureError as error:
        findings.add("record", RECORD_FILE, str(error).removeprefix(f"{RECORD_FILE}: "))
        return ()


def _check_functions(source: Checkpoint, model: Model) -> None:
    """Refuse activation functions that layers are not evaluated with."""
    functions = {model.moe.act_fn_of(layer).name for layer in model.layers}
    if unknown := functions - {*FUNCTIONS}:
        raise UnsupportedError(
            f"{source.path}/config.json: activation function {min(unknown)!r}, but layers are "
            f"evaluated with {', '.join(FUNCTIONS)}; give 0 layers (--layers 0), to compare "
            "the weights alone"
        )


def _compare(run: Verification, report: Report, layers: Layers, serving: Serving | None) -> Report:
    """Compare the data of tensors and run layers; the report with what was measured."""
    expected = run.expected
    model, units = expected.model, expected.units
    # With the config that it should have; config.json itself was checked with the structure.
    converted = ConvertedCheckpoint(
        checkpoint=run.stored.checkpoint,
        dialect=expected.dialect,
        architecture=model.architecture,
        moe=model.moe,
        format_of=expected.formats().get,
        activations_of=expected.activations.get,
    )
    formats = converted_layers(units, model.roles)
    chosen = {layer: formats[layer] for layer in choose_layers(list(formats), layers)}
    if serving is not None:
        serving.check(converted, chosen, experts=experts_run(model.moe))
    choice = choose_quantizer(quantizer_jobs(expected.items), comparing=True)
    weights = check_weights(run, choice.quantizer)
    prepared = check_prepared(
        converted, formats, pool=run.pool, progress=run.progress, findings=run.findings
    )
    return replace(
        report,
        dialect=expected.dialect.name,
        method="bounds" if expected.plan is None else "bytes",
        quantizer=UsedQuantizer(name=choice.quantizer.name, reason=choice.reason)
        if units
        else None,
        counts={
            **report.counts,
            "copied": len(expected.copies),
            "dequantized": sum(len(unit.weights) for unit in expected.dequantized),
            "converted": sum(len(unit.weights) for unit in units),
        },
        formats=weights.summaries(),
        worst_weights=tuple(weights.worst),
        errors=weights.groups(),
        requantization_errors=tuple(weights.requantization_errors),
        not_finite=tuple(weights.not_finite),
        prepared=prepared,
        layers=check_layers(run, converted, chosen, serving),
    )
