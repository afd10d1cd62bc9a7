"""The files that a publication consists of, each with its digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError
from moequant.runtime.prepared_manifest import prepared_folders
from moequant.storage.disk import sha256_of
from moequant.storage.files import MANIFEST_FILE, PREPARED_FOLDER, RECORD_FILE
from moequant.storage.folder import sidecar_files
from moequant.storage.model_card import CARD_FILE
from moequant.storage.reader import FixedFile
from moequant.verification.findings import Findings
from moequant.verification.integrity import recorded_files, recorded_prepared

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """A file to publish.

    Attributes:
        name: its path in the repository.
        content: its path on the disk, or its bytes.
        size_bytes: its size.
        sha256: its digest in hex.
    """

    name: str
    content: Path | bytes
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, name: str, content: Path | bytes, sha256: str | None = None) -> PublishedFile:
        """A file on the disk, or of bytes; without `sha256`, it is read to compute that.

        Raises:
            CheckpointError: there is no such file.
        """
        if isinstance(content, bytes):
            digest = hashlib.sha256(content).hexdigest()
            return cls(name=name, content=content, size_bytes=len(content), sha256=digest)
        size_bytes = FixedFile.at(content).size_bytes
        return cls(
            name=name, content=content, size_bytes=size_bytes, sha256=sha256 or sha256_of(content)
        )

    @property
    def git_sha1(self) -> str:
        """The name that git gives its content; it is read for it."""
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()

    def read_again(self) -> PublishedFile:
        """The same file with the digest of what is there now."""
        if isinstance(self.content, bytes):
            return self
        size_bytes = FixedFile.at(self.content).size_bytes
        return replace(self, size_bytes=size_bytes, sha256=sha256_of(self.content))


def checkpoint_files(
    path: Path, record: Mapping[str, Any], *, include_prepared: bool
) -> list[PublishedFile]:
    """The files of a converted checkpoint with their recorded digests, without its README.md.

    Args:
        path: its directory.
        record: its moequant.json.
        include_prepared: whether its prepared folders are published.

    Raises:
        CheckpointError: a file is missing, or an entry of moequant.json is no entry.
    """
    findings = Findings()
    entries = [*recorded_files(record, findings)]
    manifests = []
    if include_prepared:
        entries += recorded_prepared(path, findings)
        manifests = [
            str(PurePosixPath(PREPARED_FOLDER, folder.name, MANIFEST_FILE))
            for folder in prepared_folders(path)
        ]
    if findings.problems:
        raise CheckpointError(
            f"{path}: {findings.problems[0]}; convert again with --overwrite (overwrite=True)"
        )
    files = [PublishedFile.of(RECORD_FILE, path / RECORD_FILE)]
    files += [PublishedFile.of(name, path / name) for name in manifests]
    files += [
        PublishedFile.of(entry.file, path / entry.file, entry.sha256)
        for entry in entries
        if entry.file != CARD_FILE
    ]
    return files


def left_out(path: Path, files: list[PublishedFile]) -> list[str]:
    """Files of a checkpoint that are not published: notes that were added, and prepared folders."""
    published = {file.name for file in files} | {CARD_FILE}
    others = [str(name) for name in sidecar_files(path) if str(name) not in published]
    prepared = [f"{PREPARED_FOLDER}/{folder.name}" for folder in prepared_folders(path)]
    return others + [p for p in prepared if f"{p}/{MANIFEST_FILE}" not in published]
