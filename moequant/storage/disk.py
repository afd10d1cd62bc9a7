"""What every writer of files needs: errors that say what to do, and names that are on disk."""

from __future__ import annotations

import errno
import hashlib
import os
from typing import TYPE_CHECKING

from moequant.errors import MoequantError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_NO_SPACE = "free space there or choose another output, then run again"
_NO_RIGHT = "choose an output you may write to"
DISK_FAILED = "the disk or the way to it failed; see the system's log before you run again"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EFBIG: "files this large are refused there; choose a smaller --max-shard-size",
    errno.EIO: DISK_FAILED,
}


class explained:  # noqa: N801 - it reads as what it does: with explained(path, "written")
    """Turn an OSError into a MoequantError that says what to do.

    Args:
        path: what it was about.
        participle: what cannot be done with it, such as "written".
    """

    # No generator: those of contextlib take four times as long, and this is everywhere.
    __slots__ = ("_participle", "_path")

    def __init__(self, path: Path, participle: str) -> None:
        self._path = path
        self._participle = participle

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, OSError):
            return
        advice = _ADVICE.get(error.errno or 0, "mend the cause and run again")
        # An error that Python's library makes itself has a text alone.
        why = error.strerror or error
        raise MoequantError(
            f"{self._path}: cannot be {self._participle}: {why}; {advice}"
        ) from error


def write_all(fd: int, position: int, view: memoryview) -> None:
    """Write all of `view` at `position`; raises OSError."""
    # Linux moves at most 2 GiB a call, and any call may move less than asked.
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], position + done)


def write_file(path: Path, chunks: Iterable[memoryview]) -> None:
    """Write a file and bring it to disk; raises OSError, and half a file may be left then."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for chunk in chunks:
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a crash at any time leaves the old file or the new one.

    Raises:
        MoequantError: it cannot be written; says what to do.
    """
    partial = path.with_name(f".{path.name}.partial")
    with explained(path, "written"):
        try:
            write_file(partial, [memoryview(data)])
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Bring names just created, renamed or removed in the directory `path` to disk.

    Raises:
        MoequantError: it cannot be done; says what to do.
    """
    with explained(path, "brought to disk"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems have no such call for directories and keep names themselves.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)


def sha256_of(path: Path) -> str:
    """SHA-256, in hex, of the file at `path`; read in pieces.

    Raises:
        MoequantError: it cannot be read; says what to do.
    """
    with explained(path, "read"), path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
