"""The folder of a converted checkpoint, and which of its files matter."""

from __future__ import annotations

import os
from pathlib import Path

from moequant.errors import CheckpointError
from moequant.storage.folder import check_is_checkpoint

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


def is_read_by_engines(file: Path) -> bool:
    """Whether an engine may read a file that no conversion wrote."""
    return file.suffix not in _NOTES
