"""Basics of writing files: errors with advice, complete writes, and durable names."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from moequant.errors import MoequantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_NO_SPACE = "free space there or choose another output, then run again"
_NO_RIGHT = "choose an output you may write to"
_NO_RIGHT_TO_READ = "get the right to read it, or give another"
DISK_FAILED = "the disk or its connection failed; see the system's log before you run again"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.ENOENT: "check the path, or choose another",
    errno.EFBIG: "choose an output on a disk that takes larger files, or, of convert, a smaller "
    "--max-shard-size",
    errno.EIO: DISK_FAILED,
    errno.EEXIST: "move away what is there, then run again",
    errno.ENOTDIR: "a part of this path is a file; move it away, then run again",
}


@contextmanager
def explained(path: Path, participle: str) -> Iterator[None]:
    """Turn an OSError into a MoequantError with advice: `path` cannot be, such as, "written"."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "fix the cause and run again")
        if participle == "read" and advice is _NO_RIGHT:
            advice = _NO_RIGHT_TO_READ
        # Errors raised by Python's library itself have no strerror.
        why = error.strerror or error
        raise MoequantError(f"{path}: cannot be {participle}: {why}; {advice}") from error


@cache
def libc_function(name: str) -> Any:
    """A function of the C library that Python does not expose; None if there is none here."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


def write_all(fd: int, position: int, view: memoryview) -> None:
    """Write all of `view` at `position`; raises OSError."""
    # Linux writes at most 2 GiB per call, and any call may write less than requested.
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], position + done)


def write_file(path: Path, chunks: Iterable[memoryview]) -> None:
    """Write a new file, and fsync it; raises OSError, which may leave an incomplete file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_on(fd, chunks)
    finally:
        os.close(fd)


def append_to_file(path: Path, data: bytes) -> None:
    """Append to a file, or create it, and fsync it; after an OSError it is what it was before."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size_bytes = os.fstat(fd).st_size
        try:
            _write_on(fd, [memoryview(data)])
        except BaseException:
            os.ftruncate(fd, size_bytes)
            raise
    finally:
        os.close(fd)


def _write_on(fd: int, chunks: Iterable[memoryview]) -> None:
    for chunk in chunks:
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
    os.fsync(fd)


def replace_file(path: Path, data: bytes | Iterable[memoryview]) -> None:
    """Write `data` to `path` atomically: after a crash there is the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    chunks = [memoryview(data)] if isinstance(data, bytes) else data
    with explained(path, "written"):
        try:
            write_file(partial, chunks)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    fsync_directory(path.parent)


def existing_parent(path: Path) -> Path:
    """The path, or the nearest of the folders that it would be in, that exists."""
    return next(there for there in (path, *path.absolute().parents) if there.exists())


def check_writable(path: Path) -> None:
    """Check that a file can be written to `path`, by creating a temporary file next to it.

    An existing file does not change, and the temporary file is removed.

    Raises:
        MoequantError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.partial")
    with explained(path, "written"):
        if path.exists() and not path.is_file():
            raise MoequantError(f"{path}: exists and is not a file; choose another name")
        try:
            os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return  # another process is writing it, or was killed while it did
        beside.unlink()


def fsync_directory(path: Path) -> None:
    """Make names that were created, renamed or removed in the directory `path` durable."""
    with explained(path, "synced to disk"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems do not support fsync for directories.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)


def sha256_of(path: Path) -> str:
    """SHA-256 of the file at `path`, in hex."""
    with explained(path, "read"), path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
