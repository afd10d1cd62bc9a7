"""The folder of a converted checkpoint, and which of its files matter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError
from moequant.storage.checkpoint import natural_key
from moequant.storage.folder import check_is_checkpoint, sidecar_files, weight_files

if TYPE_CHECKING:
    from collections.abc import Set

    from moequant.verification.findings import Findings

# Notes and model cards may be added; no engine reads them.
_NOTES = (".md", ".png", ".jpg")


def existing_directory(converted: str | Path) -> Path:
    """The directory of a converted checkpoint.

    Raises:
        CheckpointError: there is none, a conversion into it is unfinished, or it holds what was
            prepared.
    """
    # Not Path.expanduser, which fails for an unknown user without naming the path.
    path = Path(os.path.expanduser(converted))  # noqa: PTH111
    try:
        found = path.is_dir()
    except OSError as error:  # a name too long, a parent we may not look into
        raise CheckpointError(f"{path}: {error.strerror}; name the converted checkpoint") from error
    if not found:
        raise CheckpointError(f"{path}: no such directory; name the converted checkpoint")
    check_is_checkpoint(path)
    return path


def check_nothing_added(path: Path, known: Set[str], message: str, findings: Findings) -> None:
    """Add a problem with `message` for each file but `known` ones that an engine may read."""
    try:
        found = [*sidecar_files(path), *weight_files(path)]
    except CheckpointError as error:
        findings.add("sidecars", str(path), str(error))
        return
    for file in sorted(found, key=lambda file: natural_key(str(file))):
        if str(file) not in known and file.suffix not in _NOTES:
            findings.add("sidecars", str(file), message)
