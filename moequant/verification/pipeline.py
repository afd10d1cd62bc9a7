"""verify(): the one function behind `moequant verify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moequant.checkpoint.converted import ConvertedCheckpoint
from moequant.checkpoint.source import Checkpoint, locate
from moequant.conversion import DEFAULT_WORKERS
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import check_complete, check_shapes, classify_all, find_architecture
from moequant.progress import SilentProgress
from moequant.runtime.load import ACTIVATIONS
from moequant.verification.expectation import expect_by_config, expect_by_record
from moequant.verification.findings import Findings, WeightErrors
from moequant.verification.layers import (
    DEFAULT_LAYERS,
    check_layers,
    choose_layers,
    converted_layers,
)
from moequant.verification.report import Report
from moequant.verification.stored import read_stored
from moequant.verification.structure import (
    check_config,
    check_shards,
    check_sidecars,
    check_tensors,
)
from moequant.verification.weights import check_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.models import Architecture, MoeConfig, TensorRole
    from moequant.progress import Progress
    from moequant.verification.expectation import Expectation
    from moequant.verification.layers import Layers
    from moequant.verification.report import LayerError
    from moequant.verification.stored import StoredCheckpoint


def verify(
    converted: str | Path,
    *,
    against: str | Path,
    revision: str | None = None,
    layers: Layers = DEFAULT_LAYERS,
    workers: int = DEFAULT_WORKERS,
    progress: Progress | None = None,
) -> Report:
    """Prove a converted checkpoint right, or say what is wrong with it.

    It is read as a stranger would read it: from disk, through its dialect. Whatever is wrong with
    it becomes a problem in the report; nothing stops at the first.

    Args:
        converted: directory of the converted checkpoint, by moequant or another tool.
        against: the source: a directory, or id of a repository on the Hugging Face hub.
        revision: branch, tag or commit of a hub repository.
        layers: which expert layers to run: "all", "first", or a number of them spread evenly; the
            default of three means the first, a middle one and the last.
        workers: units compared at the same time.
        progress: told what is done.

    Raises:
        CheckpointError: the source is damaged, incomplete or contradicts itself, there is no
            directory `converted`, or a file cannot be read or changes meanwhile.
        UnsupportedError: an architecture, or a source dtype, that we do not know.
    """
    source = _Source.open(against, revision)
    path = Path(converted)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; name the converted checkpoint")
    if layers != 0 and source.moe.activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"config.json: activation {source.moe.activation!r}, but the runtime computes "
            f"{', '.join(ACTIVATIONS)}; verify with layers = 0 to run none"
        )
    findings = Findings()
    stored = read_stored(path, findings)
    check_sidecars(source.checkpoint, path, findings, by_moequant=stored.has_record)
    if stored.record is not None:
        check_shards(path, stored.record, findings)
    weights = WeightErrors()
    layer_errors: list[LayerError] = []
    expected = _expect(source, stored, findings)
    if expected is not None:
        task = progress or SilentProgress()
        check_tensors(stored, expected, findings)
        if stored.has_config:
            check_config(source.checkpoint, stored.checkpoint, expected, source.roles, findings)
        weights = check_weights(
            source.checkpoint, stored, expected, workers=workers, progress=task, findings=findings
        )
        layer_errors = _check_layers(source, stored, expected, layers, task, findings)
    tensors = stored.checkpoint.tensors
    return Report(
        converted=str(converted),
        source=str(against),
        dialect=expected.dialect.name if expected else None,
        method=expected.method if expected else None,
        problems=tuple(findings.problems),
        problem_count=findings.count,
        counts={
            "tensors": len(tensors),
            "bytes": sum(info.size_bytes for info in tensors.values()),
            "copied": len(expected.copies) if expected else 0,
            "converted": sum(len(unit.weights) for unit in expected.units) if expected else 0,
        },
        formats=weights.summaries(),
        worst_weights=weights.worst(),
        layers=tuple(layer_errors),
    )


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The source, checked to be whole."""

    checkpoint: Checkpoint
    architecture: Architecture
    moe: MoeConfig
    roles: Mapping[str, TensorRole]

    @classmethod
    def open(cls, source: str | Path, revision: str | None) -> _Source:
        checkpoint = Checkpoint.open(locate(source, revision))
        architecture = find_architecture(checkpoint.config)
        moe = architecture.read_config(checkpoint.config)
        roles = classify_all(architecture, checkpoint.tensors)
        check_complete(architecture, moe, roles)
        check_shapes(moe, roles, checkpoint.tensors)
        return cls(checkpoint=checkpoint, architecture=architecture, moe=moe, roles=roles)


def _expect(source: _Source, stored: StoredCheckpoint, findings: Findings) -> Expectation | None:
    """By the record if it can be used, else by config.json."""
    if stored.record is not None:
        expected = expect_by_record(source.checkpoint, stored.record, findings)
        if expected is not None:
            return expected
    return expect_by_config(source.checkpoint, source.roles, stored.checkpoint, findings)


def _check_layers(
    source: _Source,
    stored: StoredCheckpoint,
    expected: Expectation,
    layers: Layers,
    progress: Progress,
    findings: Findings,
) -> list[LayerError]:
    converted = ConvertedCheckpoint(
        checkpoint=stored.checkpoint,
        dialect=expected.dialect,
        # As expected, for what config.json says of these was checked on its own.
        architecture=source.architecture,
        moe=source.moe,
        format_of=expected.formats().get,
    )
    formats = converted_layers(expected.units, source.roles)
    chosen = {layer: formats[layer] for layer in choose_layers(list(formats), layers)}
    return check_layers(source.checkpoint, converted, chosen, progress=progress, findings=findings)
