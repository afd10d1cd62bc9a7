"""Detect whether a source has changed.

Headers are not enough, because two fine-tunes of a model have the same. During a conversion, also
over several runs, sizes and modification times are compared; for a finished output, which may have
been copied, a sample of the contents. Digests of all contents are optional.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from moequant.errors import CheckpointError
from moequant.storage.files import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from moequant.progress import Progress
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo
    from moequant.storage.reader import FixedFile

SAMPLE_BYTES = 4096
_RANGES_AT_ONCE = 128
_CHUNK_BYTES = 8 << 20
_HEX_SHA256 = re.compile("[0-9a-f]{64}")


def source_state(checkpoint: Checkpoint, sidecars: Iterable[Path]) -> dict[str, list[int]]:
    """Size and modification time (ns) of every file that a conversion reads.

    For weights and config.json, it is the state when the checkpoint was opened.

    Raises:
        CheckpointError: a file is missing.
    """
    assert checkpoint.config_file is not None, "of a checkpoint that was opened"
    files = {**checkpoint.files, CONFIG_FILE: checkpoint.config_file}
    files |= {str(file): checkpoint.folder.open(str(file)) for file in sidecars}
    return {name: [file.size_bytes, file.mtime_ns] for name, file in files.items()}


def check_unchanged(checkpoint: Checkpoint, before: Mapping[str, Any]) -> None:
    """Check that the source still has the `source_state` of `before`; raises CheckpointError."""
    for file, state in before.items():
        found = checkpoint.folder.open(file)
        if [found.size_bytes, found.mtime_ns] != state:
            raise CheckpointError(
                f"{found.path}: changed while it was converted ({state[0]} bytes "
                f"before, {found.size_bytes} now); the output was not changed. Wait until nothing "
                "writes to it, then start over with --overwrite"
            )


def source_digests(checkpoint: Checkpoint, sidecars: Iterable[Path]) -> dict[str, Any]:
    """The digests of the source's contents for moequant.json.

    The weights' digest covers the first and the last 4 KiB of every tensor, which distinguishes
    models and takes about a second for the largest.

    Raises:
        CheckpointError: the source cannot be read, or changed since it was opened.
    """
    return {
        "config_sha256": _sha256(checkpoint.folder.open(CONFIG_FILE)),
        "sample_sha256": _sample(checkpoint),
        "sidecars": {str(f): _sha256(checkpoint.folder.open(str(f))) for f in sidecars},
    }


def _sample(checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256()
    for file, ranges in _sampled(checkpoint.tensors.values()):
        digest.update(checkpoint.files[file].read_ranges(ranges))
    return digest.hexdigest()


def _sampled(infos: Iterable[TensorInfo]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Both ends of every tensor, as pairs of file and ranges; adjacent ranges are joined."""
    file = ""
    ranges: list[tuple[int, int]] = []
    for info in infos:
        if ranges and (info.file != file or len(ranges) >= _RANGES_AT_ONCE):
            yield file, ranges
            ranges = []
        file = info.file
        size = min(SAMPLE_BYTES, info.size_bytes)
        for start in (info.start, info.stop - size):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((first, start + size))
    if ranges:
        yield file, ranges


def content_digests(
    checkpoint: Checkpoint, workers: int, progress: Progress
) -> dict[str, dict[str, str]]:
    """SHA-256 of every weight file, which `--hash-source` adds to moequant.json.

    The hub's cache names a blob by this digest, so that a damaged one is detected.

    Raises:
        CheckpointError: a file cannot be read, has changed, or does not match its blob's name.
    """
    files = checkpoint.files
    progress.start("hashing the source", sum(file.size_bytes for file in files.values()))
    with ThreadPoolExecutor(workers) as pool:
        digests = pool.map(partial(_digest, progress=progress), files.values())
        found = dict(zip(files, digests, strict=True))
    progress.finish()
    return {"content_sha256": found}


def _digest(file: FixedFile, progress: Progress) -> str:
    found = _sha256(file, progress)
    blob = file.path.resolve()
    if blob.parent.name == "blobs" and _HEX_SHA256.fullmatch(blob.name) and blob.name != found:
        raise CheckpointError(
            f"{file.path}: its SHA-256 is {found}, but the hub's cache calls it {blob.name}; it "
            f"is damaged: remove {blob} and fetch it again"
        )
    return found


def _sha256(file: FixedFile, progress: Progress | None = None) -> str:
    digest = hashlib.sha256()
    for chunk in file.chunks(0, file.size_bytes, _CHUNK_BYTES):
        digest.update(chunk)
        if progress is not None:
            progress.advance(len(chunk), file.path.name)
    return digest.hexdigest()
