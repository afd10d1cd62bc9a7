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
from typing import TYPE_CHECKING, Any, Protocol

from moequant.errors import CheckpointError
from moequant.storage.files import CONFIG_FILE
from moequant.storage.hub_folder import HubFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moequant.progress import Progress
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo
    from moequant.storage.reader import FixedFile

SAMPLE_BYTES = 4096
_RANGES_AT_ONCE = 128
_HEX_SHA256 = re.compile("[0-9a-f]{64}")
_HEX_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


class Sample(Protocol):
    """The ranges of `sampled_ranges` of one file, kept from when it was there."""

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        """The next ranges, concatenated."""
        ...


def source_state(checkpoint: Checkpoint, sidecars: Iterable[Path]) -> dict[str, list[Any]]:
    """Size and modification time (ns) of every file that a conversion reads.

    For weights and config.json, it is the state when the checkpoint was opened. For files on the
    hub or in its cache, the hub's name of the content, a digest, takes the place of the time, so
    that a conversion may go on where fewer or more of them are in the cache.

    Raises:
        CheckpointError: a file is missing.
    """
    if isinstance(checkpoint.folder, HubFolder):
        return checkpoint.folder.state([*checkpoint.files, CONFIG_FILE, *map(str, sidecars)])
    assert checkpoint.config_file is not None, "of a checkpoint that was opened"
    files = {**checkpoint.files, CONFIG_FILE: checkpoint.config_file}
    files |= {str(file): checkpoint.folder.open(str(file)) for file in sidecars}
    return {name: _state(file) for name, file in files.items()}


def _state(file: FixedFile) -> list[Any]:
    blob = file.path.resolve()
    is_named = blob.parent.name == "blobs" and _HEX_DIGEST.fullmatch(blob.name)
    return [file.size_bytes, blob.name if is_named else file.mtime_ns]


def check_unchanged(checkpoint: Checkpoint, before: Mapping[str, Any]) -> None:
    """Check that the source still has the `source_state` of `before`; raises CheckpointError.

    A commit on the hub does not change.
    """
    if isinstance(checkpoint.folder, HubFolder):
        return
    for file, state in before.items():
        found = checkpoint.folder.open(file)
        if _state(found) != state:
            raise CheckpointError(
                f"{found.path}: changed while it was converted ({state[0]} bytes "
                f"before, {found.size_bytes} now); the output was not changed. Wait until nothing "
                "writes to it, then start over with --overwrite (overwrite=True)"
            )


def source_digests(
    checkpoint: Checkpoint,
    sidecars: Iterable[Path],
    samples: Mapping[str, Sample] | None = None,
) -> dict[str, Any]:
    """The digests of the source's contents for moequant.json.

    The weights' digest covers the first and the last 4 KiB of every tensor, which distinguishes
    models and takes about a second for the largest. Files in `samples` are read there.

    Raises:
        CheckpointError: the source cannot be read, or changed since it was opened.
    """
    return {
        "config_sha256": checkpoint.folder.open(CONFIG_FILE).sha256(),
        "sample_sha256": _sample(checkpoint, samples or {}),
        "sidecars": {str(f): checkpoint.folder.open(str(f)).sha256() for f in sidecars},
    }


def _sample(checkpoint: Checkpoint, samples: Mapping[str, Sample]) -> str:
    digest = hashlib.sha256()
    for file, ranges in sampled_ranges(checkpoint.tensors.values()):
        read = samples[file].read_ranges if file in samples else checkpoint.files[file].read_ranges
        digest.update(read(ranges))
    return digest.hexdigest()


def sampled_ranges(infos: Iterable[TensorInfo]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
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
    name = file.path.name
    found = file.sha256(lambda size_bytes: progress.advance(size_bytes, name))
    blob = file.path.resolve()
    if blob.parent.name == "blobs" and _HEX_SHA256.fullmatch(blob.name) and blob.name != found:
        raise CheckpointError(
            f"{file.path}: its SHA-256 is {found}, but the hub's cache calls it {blob.name}; it "
            f"is damaged: remove {blob} and fetch it again"
        )
    return found
