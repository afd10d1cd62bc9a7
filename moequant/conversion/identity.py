"""Whether a source is still the one a conversion was made from.

Headers alone do not say: a second fine-tune of a model has the same. Between two runs, sizes and
modification times do; for a finished output, which may have travelled, a sample of the contents.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from moequant.checkpoint.files import CONFIG_FILE
from moequant.checkpoint.writer import sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from moequant.checkpoint.source import Checkpoint

SAMPLE_BYTES = 4096


def source_state(checkpoint: Checkpoint, sidecars: Iterable[Path]) -> dict[str, list[int]]:
    """Size and modification time (ns) of every file that a conversion reads."""
    state = checkpoint.file_state()
    for file in (CONFIG_FILE, *map(str, sidecars)):
        status = (checkpoint.path / file).stat()
        state[file] = [status.st_size, status.st_mtime_ns]
    return state


def source_digests(checkpoint: Checkpoint, sidecars: Iterable[Path]) -> dict[str, Any]:
    """What moequant.json records of the source's contents.

    The weights' digest is over the first and the last 4 KiB of every tensor: enough to tell two
    models apart, and read in a second for the largest.

    Raises:
        CheckpointError: the source cannot be read, or changed since it was opened.
    """
    return {
        "config_sha256": sha256_of(checkpoint.path / CONFIG_FILE),
        "sample_sha256": _sample(checkpoint),
        "sidecars": {str(file): sha256_of(checkpoint.path / file) for file in sidecars},
    }


def _sample(checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256()
    for name, info in checkpoint.tensors.items():
        size = min(SAMPLE_BYTES, info.size_bytes)
        for offset in (0, info.size_bytes - size):
            buffer = bytearray(size)
            checkpoint.read_into(name, offset, buffer)
            digest.update(buffer)
    return digest.hexdigest()
