"""The note that a checkpoint was verified, and by which digests it can be told to be the same.

moequant.json has the digest of every file of a checkpoint, and the manifest of a prepared folder
those of its files. So the digests of these few files say which bytes were verified. The note lies
in a hidden file beside them, which no engine reads and no upload takes along.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from moequant._version import __version__
from moequant.errors import CheckpointError, MoequantError
from moequant.runtime.prepared_manifest import prepared_folders
from moequant.storage.disk import replace_file
from moequant.storage.documents import read_document
from moequant.storage.files import MANIFEST_FILE, RECORD_FILE, VERIFIED_FILE
from moequant.storage.reader import FixedFile
from moequant.storage.schema_errors import first_fault

if TYPE_CHECKING:
    from moequant.verification.report import Report


class _Read(BaseModel):
    """Fields of a report; those that nothing here needs are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NotedWeight(_Read):
    """The weight of largest relative error in a format; see `WeightCheck`."""

    name: str
    relative_error: float | None


class NotedFormat(_Read):
    """The errors of all weights of a format; see `FormatSummary`."""

    format: str
    weights: int
    relative_error: float | None
    sqnr_db: float | None
    worst: NotedWeight


class NotedGroup(_Read):
    """The errors of the weights of a role, layer and projection; see `GroupErrors`."""

    role: str
    layer: int | None
    projection: str | None
    format: str
    weights: int
    relative_error: float | None


class NotedLayer(_Read):
    """A layer that was run; see `LayerCheck`."""

    layer: int
    format: str
    layer_error: float | None
    quantized_activations_error: float | None
    # Notes of versions before 0.1 lack it.
    activations_not_measured: str | None = None


class NotedReport(_Read):
    """What is kept of a `Report` without a problem."""

    ok: Literal[True]
    method: Literal["bytes", "bounds"]
    record_sha256: str
    manifests_sha256: dict[str, str]
    formats: tuple[NotedFormat, ...]
    errors: tuple[NotedGroup, ...]
    layers: tuple[NotedLayer, ...]


class Verified(_Read):
    """That a checkpoint was verified.

    Attributes:
        schema_version: of the note.
        moequant: version that verified it.
        report: what it found.
    """

    schema_version: Literal[1] = 1
    moequant: str
    report: NotedReport


def digests_of(path: Path) -> tuple[str | None, dict[str, str]]:
    """SHA-256 of moequant.json, None if it cannot be read, and of manifests by their target."""
    manifests = {folder.name: _digest(folder / MANIFEST_FILE) for folder in prepared_folders(path)}
    return _digest(path / RECORD_FILE), {t: d for t, d in manifests.items() if d is not None}


def as_verified(report: Report) -> Verified:
    """The note of a report.

    Raises:
        MoequantError: the report has problems, or is of a checkpoint without moequant.json.
    """
    if not report.ok or report.record_sha256 is None:
        why = "has no moequant.json" if report.ok else f"has {report.problem_count} problems"
        raise MoequantError(f"{report.converted}: {why}, so it cannot be noted as verified")
    return Verified(moequant=__version__, report=NotedReport.model_validate(report.to_json()))


def note_verified(report: Report) -> None:
    """Note beside a checkpoint that it was verified, for `push`.

    Raises:
        MoequantError: as `as_verified`; or the note cannot be written.
    """
    note = as_verified(report).model_dump(mode="json")
    path = Path(report.converted).expanduser() / VERIFIED_FILE
    replace_file(path, (json.dumps(note, indent=2) + "\n").encode())


def read_verified(path: Path) -> Verified | None:
    """The note beside a checkpoint; None if there is none.

    Raises:
        CheckpointError: it cannot be read, or was edited.
    """
    file = path / VERIFIED_FILE
    if not file.exists():
        return None
    try:
        return Verified.model_validate(read_document(FixedFile.at(file)))
    except ValidationError as error:
        raise CheckpointError(
            f"{file}: {first_fault(error)}; remove the file and run moequant verify again"
        ) from None


def _digest(file: Path) -> str | None:
    """SHA-256 of a file in hex; None if it cannot be read."""
    try:
        return FixedFile.at(file).sha256()
    except CheckpointError:
        return None
