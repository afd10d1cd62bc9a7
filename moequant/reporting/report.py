"""make_report(), which `moequant report` calls."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moequant._version import __version__
from moequant.conversion import DEFAULT_WORKERS
from moequant.errors import ArgumentError, MoequantError
from moequant.reporting.gaps import find_gaps
from moequant.reporting.outputs import Checked, describe_output, read_record_of, sizes_of
from moequant.reporting.page import render_page
from moequant.reporting.saved import (
    read_conversion,
    read_evaluation,
    read_verification,
    verification_document,
)
from moequant.statistics import Statistics
from moequant.storage.files import RECORD_FILE
from moequant.storage.given_path import given_path
from moequant.storage.hub_folder import open_headers
from moequant.storage.process_memory import peak_resident_bytes
from moequant.storage.reader import FixedFile
from moequant.verification import check_integrity, verify
from moequant.verification.stored import existing_directory
from moequant.weights.converted import described_architectures

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moequant.models import Architecture
    from moequant.progress import Progress
    from moequant.storage.checkpoint import Checkpoint
    from moequant.verification.layers import Layers

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """The result of `make_report`.

    Attributes:
        document: plain data with stable keys, which docs/report.md lists.
    """

    document: dict[str, Any]

    @property
    def problem_count(self) -> int:
        """The number of problems that checks found in all outputs."""
        return sum(output["problem_count"] for output in self.document["outputs"])

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return self.document

    def to_html(self) -> str:
        """The page: one HTML document that needs nothing else."""
        return render_page(self.document)


def make_report(
    converted: Sequence[str | Path],
    *,
    against: str | Path | None = None,
    revision: str | None = None,
    architecture: str | Path | None = None,
    statistics: str | Path | None = None,
    activation_scales: str | Path | None = None,
    layers: Layers | None = None,
    verified: Sequence[str | Path] = (),
    evaluations: Sequence[str | Path] = (),
    conversions: Sequence[str | Path] = (),
    workers: int = DEFAULT_WORKERS,
    progress: Progress | None = None,
) -> ModelReport:
    """Say what is known of converted checkpoints, and of each other.

    With `against`, each is verified, unless `verified` has its result. What was verified earlier,
    and what there is no source for, is compared with its moequant.json, if it has one.

    Args:
        converted: directories of converted checkpoints, at least one.
        against: the source: a directory, or id of a repository on the Hugging Face hub.
        revision: branch, tag or commit of a hub repository.
        architecture: a TOML file that describes the source's architecture.
        statistics: a file of statistics: shown, and given to the verification of what was made
            with statistics.
        activation_scales: likewise, a file of activation scales.
        layers: how many layers a verification runs; by default three.
        verified: files with what `moequant verify --against SOURCE --json` printed.
        evaluations: files with what `moequant evaluate --json` printed.
        conversions: files with what `moequant convert --json` printed.
        workers: number of weights worked on in parallel.
        progress: receives the progress.

    Raises:
        MoequantError: no checkpoint or one twice, a saved result that is none or is of no
            checkpoint here.
        CheckpointError: source or checkpoint cannot be read, or a conversion is unfinished.
        UnsupportedError: an unknown architecture or quantization, or a path that is neither a text
            nor a path.
        StatisticsError: statistics or activation scales are damaged, missing, or others than those
            of a checkpoint.
    """
    started = time.monotonic()
    paths = _directories(converted)
    earlier = _by_output(paths, _saved("verified", verified), read_verification, _is_verified)
    made = _by_output(paths, _saved("conversions", conversions), read_conversion, _is_converted)
    found = [read_evaluation(file) for file in _saved("evaluations", evaluations)]
    measured = None if statistics is None else Statistics.load(statistics)
    coverage = None if measured is None else _calibration(measured)
    before = None
    if against is not None:
        headers = open_headers(str(against), revision)
        before = sizes_of(headers, _described(headers, paths, architecture))
    check = partial(
        _check,
        against=against,
        workers=workers,
        progress=progress,
        of_source={
            "revision": revision,
            "architecture": architecture,
            **({} if layers is None else {"layers": layers}),
        },
        made_with={"statistics": statistics, "activation_scales": activation_scales},
    )
    outputs = []
    for name, path in zip(_names(paths), paths, strict=True):
        output = describe_output(
            path,
            name,
            check(path, earlier.get(path)),
            source=None if against is None else str(against),
            architecture=architecture,
            before=before,
            workers=workers,
        )
        output["conversion"] = made.get(path)
        output["evaluated_as"] = _test_of(path, found)
        outputs.append(output)
    document = {
        "schema_version": SCHEMA_VERSION,
        "moequant": __version__,
        "made": {
            "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.monotonic() - started, 3),
            "peak_bytes": peak_resident_bytes(),
        },
        "source": None if against is None else str(against),
        "outputs": outputs,
        "evaluations": found,
        "calibration": coverage,
    }
    return ModelReport(document={**document, "not_measured": find_gaps(document)})


def _directories(converted: Sequence[str | Path]) -> list[Path]:
    if not converted:
        raise ArgumentError("no checkpoint to report on; name the converted checkpoints")
    paths = [existing_directory(path) for path in converted]
    for index, path in enumerate(paths):
        if any(path.samefile(other) for other in paths[:index]):
            raise ArgumentError(f"{path}: named twice; name each checkpoint once")
    return paths


def _described(
    source: Checkpoint, paths: Sequence[Path], architecture: str | Path | None
) -> tuple[Architecture, ...]:
    """Architectures that a file, else the record of the source or an output describes."""
    folders = (source.path, *paths)
    return next(filter(None, (described_architectures(f, architecture) for f in folders)), ())


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of folders, or whole paths where two have the same name."""
    names = [path.resolve().name for path in paths]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def _by_output(
    paths: Sequence[Path], files: Iterable[Path], read: Any, is_of: Any
) -> dict[Path, dict[str, Any]]:
    """Saved results by the checkpoint that they are of."""
    found: dict[Path, dict[str, Any]] = {}
    for file in files:
        result = read(file)
        path = next((path for path in paths if is_of(result, path)), None)
        if path is None:
            listed = ", ".join(map(str, paths))
            raise MoequantError(
                f"{file}: a result of {result.get('converted') or result.get('output')}, as it was "
                f"then, but the report is of {listed}; give the result of one of these, or leave "
                "it out"
            )
        if path in found:
            raise MoequantError(f"{file}: another result of {path} was given; give one of the two")
        found[path] = result
    return found


def _saved(argument: str, files: Iterable[str | Path]) -> list[Path]:
    """The files of an argument, which is named where one is no path."""
    what = "a saved result"
    return [given_path(argument, file, what=what, error=MoequantError) for file in files]


def _is_verified(result: dict[str, Any], path: Path) -> bool:
    """Whether a result of verify is of the checkpoint in a directory, as it is now."""
    if (path / RECORD_FILE).exists():
        record = FixedFile.at(path / RECORD_FILE)
        content = record.read(0, record.size_bytes)
        return bool(result["record_sha256"] == hashlib.sha256(content).hexdigest())
    return result["record_sha256"] is None and _is_at(result["converted"], path)


def _is_converted(result: dict[str, Any], path: Path) -> bool:
    return _is_at(result["output"], path)


def _is_at(recorded: str, path: Path) -> bool:
    """Whether a path in a result, relative to some folder, is that of a checkpoint."""
    try:
        return Path(recorded).resolve() == path.resolve()
    except (OSError, ValueError):  # a path of another system, or none at all
        return False


def _test_of(path: Path, evaluations: Iterable[dict[str, Any]]) -> list[int] | None:
    """Which test of which evaluation is this checkpoint, by its path; None if none is."""
    for place, evaluation in enumerate(evaluations):
        for index, test in enumerate(evaluation["tests"]):
            if _is_at(test["name"], path):
                return [place, index]
    return None


def _check(
    path: Path,
    earlier: dict[str, Any] | None,
    *,
    against: str | Path | None,
    workers: int,
    progress: Progress | None,
    of_source: dict[str, Any],
    made_with: dict[str, Any],
) -> Checked:
    """Verify a checkpoint, or compare it with its record."""
    started = time.monotonic()
    has_record = (path / RECORD_FILE).exists()
    verification = earlier
    if earlier is None and against is not None:
        record = read_record_of(path) or {}
        given = {key: value for key, value in made_with.items() if record.get(key) is not None}
        result = verify(
            path, against=against, workers=workers, progress=progress, **of_source, **given
        )
        verification = verification_document(result.to_json())
    integrity = None
    if has_record and (earlier is not None or against is None):
        unchanged = check_integrity(path, workers=workers, progress=progress)
        integrity = {key: value for key, value in unchanged.to_json().items() if key != "record"}
    return Checked(
        verification=verification,
        earlier=earlier is not None,
        integrity=integrity,
        seconds=time.monotonic() - started,
    )


def _calibration(statistics: Statistics) -> dict[str, Any]:
    """What experts saw, as `moequant calibrate --json` has it."""
    record = statistics.record
    return {
        "sha256": statistics.digest,
        "data": record.data.model_dump(),
        "run": record.run,
        "experts": record.experts,
        "top_k": record.top_k,
        "prior_tokens": record.prior_tokens,
        "hessian": record.hessian,
        "layers": [statistics.coverage(layer) for layer in statistics.layers],
    }
