"""Check that the files of a converted checkpoint are unchanged, by its own moequant.json.

Every recorded byte is read once, and the source is not needed. This finds changes since the
conversion; `verify` checks the conversion itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from moequant.conversion import DEFAULT_WORKERS, is_unfinished
from moequant.errors import ArgumentError, CheckpointError
from moequant.progress import SilentProgress
from moequant.runtime.prepared_manifest import prepared_folders, read_manifest
from moequant.storage.documents import object_at, read_document
from moequant.storage.files import (
    CONFIG_FILE,
    INDEX_FILE,
    PREPARED_FOLDER,
    RECORD_FILE,
    WORK_FOLDER,
)
from moequant.storage.folder import UNFINISHED, is_inner_name
from moequant.storage.model_card import card_is_of
from moequant.storage.reader import FixedFile
from moequant.verification.findings import Findings, cut
from moequant.verification.report import IntegrityReport
from moequant.verification.stored import check_nothing_added, existing_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from moequant.progress import Progress

_KEYS = ("moequant", "torch", "architecture", "dialect", "plan_sha256")
"""Keys of moequant.json that the report repeats."""


class RecordedFile(NamedTuple):
    """The record's entry of a file; a size of None is not recorded."""

    file: str
    bytes: int | None
    sha256: str


def check_integrity(
    converted: str | Path,
    *,
    prepared: bool = True,
    workers: int = DEFAULT_WORKERS,
    progress: Progress | None = None,
) -> IntegrityReport:
    """Read every file that moequant.json records once, and compare sizes and digests.

    Args:
        converted: directory of a checkpoint that moequant converted.
        prepared: whether prepared folders are checked, too.
        workers: number of files read in parallel.
        progress: receives the progress.

    Raises:
        CheckpointError: there is no such directory, the conversion is unfinished, or moequant.json
            is missing or unreadable.
        ArgumentError: `workers` is less than 1.
    """
    if workers < 1:
        raise ArgumentError(f"workers = {workers}, but must be at least 1")
    path = existing_directory(converted)
    if not (path / RECORD_FILE).exists():
        raise CheckpointError(
            f"{path / RECORD_FILE}: missing, and the digests are in it; verify a checkpoint of "
            "another tool with moequant verify CONVERTED --against SOURCE"
        )
    record = read_document(FixedFile.at(path / RECORD_FILE))
    findings = Findings()
    if is_unfinished(path):
        findings.add("files", WORK_FOLDER, f"{UNFINISHED}; it will replace this checkpoint")
    recorded = [*recorded_files(record, findings)]
    if prepared:
        recorded += recorded_prepared(path, findings)
    files = _open_files(path, recorded, findings)
    if all(_is_table(key, table) for key, table in _tables(record).items()):
        # Else it is not known which files were added.
        known = {entry.file for entry in recorded}
        check_nothing_added(path, known, "not recorded; engines may read it: remove it", findings)
    task = progress or SilentProgress()
    task.start("reading", sum(file.size_bytes for _, file in files))
    with ThreadPoolExecutor(workers) as pool:
        for fault in pool.map(partial(_check_digest, progress=task), files):
            if fault is not None:
                findings.add("record", *fault)
    task.finish()
    # The record may have been edited: a value that is no text may be NaN, which JSON cannot hold.
    said = {key: record.get(key) for key in _KEYS}
    return IntegrityReport(
        converted=str(converted),
        problems=tuple(findings.problems),
        problem_count=findings.count,
        files=len(files),
        bytes=sum(file.size_bytes for _, file in files),
        record={k: cut(v) if isinstance(v, str) else None for k, v in said.items()},
    )


def recorded_files(record: Mapping[str, Any], findings: Findings) -> Iterator[RecordedFile]:
    """Every recorded file; invalid entries become problems."""
    for key, table in _tables(record).items():
        if not _is_table(key, table):
            message = "not a table of digests by file"
            findings.add("record", f"{RECORD_FILE}.{key}", message, unusable_record=True)
            continue
        for file, entry in table.items():
            match entry if is_inner_name(file) else None:
                case str():  # of sidecar files only the digest is recorded
                    yield RecordedFile(file, None, entry)
                case {"bytes": size, "sha256": str(digest)} if (
                    type(size) is int and len(entry) == 2
                ):
                    yield RecordedFile(file, size, digest)
                case _:
                    message = f"{file!r}: {entry!r} is no entry"
                    findings.add("record", f"{RECORD_FILE}.{key}", message)
    files = record.get("files")
    for file in (CONFIG_FILE, INDEX_FILE):
        if isinstance(files, dict) and file not in files:
            findings.add("record", f"{RECORD_FILE}.files", f"lacks {file}")


def _tables(record: Mapping[str, Any]) -> dict[str, Any]:
    """What should be the tables of digests, by key."""
    return {
        "shards": record.get("shards"),
        "files": record.get("files"),
        "source.sidecars": object_at(record, "source").get("sidecars"),
    }


def _is_table(key: str, table: object) -> bool:
    """Whether it is one; a source may have no sidecar files."""
    return isinstance(table, dict) and (bool(table) or key == "source.sidecars")


def recorded_prepared(path: Path, findings: Findings) -> Iterator[RecordedFile]:
    """Kernel-ready files, by the manifest of each target."""
    for folder in prepared_folders(path):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            findings.add("prepared", folder.name, str(error))
            continue
        for layer in manifest.layers.values():
            file = str(PurePosixPath(PREPARED_FOLDER, folder.name, layer.file))
            yield RecordedFile(file, layer.bytes, layer.sha256)


def _open_files(
    path: Path, recorded: list[RecordedFile], findings: Findings
) -> list[tuple[RecordedFile, FixedFile]]:
    """The files that exist with the recorded size; others need not be read."""
    files = []
    for entry in recorded:
        try:
            file = FixedFile.at(path / entry.file)
        except CheckpointError as error:
            findings.add("files", entry.file, str(error).removeprefix(f"{path / entry.file}: "))
            continue
        if entry.bytes not in (None, file.size_bytes):
            findings.add(
                "files", entry.file, f"{file.size_bytes} bytes, but {entry.bytes} are recorded"
            )
            continue
        files.append((entry, file))
    return files


def _check_digest(
    opened: tuple[RecordedFile, FixedFile], progress: Progress
) -> tuple[str, str] | None:
    """The file's name and what is wrong with its contents; None if nothing is."""
    entry, file = opened
    try:
        found = file.sha256(lambda size_bytes: progress.advance(size_bytes, entry.file))
    except CheckpointError as error:
        return entry.file, str(error).removeprefix(f"{file.path}: ")
    if found != entry.sha256 and not card_is_of(file.path, entry.sha256):
        return entry.file, f"SHA-256 is {found}, but {entry.sha256} is recorded"
    return None
