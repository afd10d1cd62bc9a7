"""Positional reads of a file that must not change after it was opened.

Decisions, each with the failure it prevents:

* pread into the caller's buffer, not mmap: mapped pages count as memory of the process, so that a
  conversion would seem to hold the whole checkpoint.
* Each read opens and closes the file, which takes microseconds. Otherwise hundreds of shards and
  several workers would run out of descriptors.
* Size and modification time are compared after each read. Otherwise bytes of a file that is still
  being downloaded could end up in a finished conversion.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError
from moequant.storage.disk import DISK_FAILED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_DIGEST_CHUNK_BYTES = 8 << 20
_MAX_BUFFERS = 1024
"""Linux's limit per call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedFile:
    """A file that is read by position, from any thread, and must not change.

    Attributes:
        path: the file's path.
        size_bytes: its size when `at` was called.
        mtime_ns: its modification time when `at` was called.
    """

    path: Path
    size_bytes: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> FixedFile:
        """The file at `path` in its current state; symlinks are followed.

        Raises:
            CheckpointError: there is no such file, or it is not a regular one.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        # Opening a named pipe would wait for a writer forever.
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file; replace it by the file itself")
        return cls(path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    @property
    def is_local(self) -> bool:
        """Whether its bytes are on a disk of this machine."""
        return True

    def stop_waiting(self) -> None:
        """End reads that wait for the file, of which there are none."""

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill `buffers`, writable bytes, in order from byte `start` of the file.

        Raises:
            CheckpointError: the file cannot be read, is too short, or has changed.
        """
        with self._opened() as fd:
            self._fill(fd, start, *buffers)

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes from `start` up to `stop`; raises as `read_into`."""
        return self.read_ranges([(start, stop)])

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> bytearray:
        """The bytes of several ranges (start, stop), concatenated; raises as `read_into`."""
        data = bytearray(sum(stop - start for start, stop in ranges))
        view, done = memoryview(data), 0
        with self._opened() as fd:
            for start, stop in ranges:
                self._fill(fd, start, view[done : done + stop - start])
                done += stop - start
        return data

    def chunks(self, start: int, stop: int, chunk_bytes: int) -> Iterator[memoryview]:
        """The bytes from `start` up to `stop`, in chunks of at most `chunk_bytes`.

        All chunks share one buffer: each is valid until the next one. Raises as `read_into`.
        """
        assert chunk_bytes > 0, chunk_bytes
        buffer = memoryview(bytearray(min(chunk_bytes, stop - start)))
        with self._opened() as fd:
            for position in range(start, stop, chunk_bytes):
                chunk = buffer[: stop - position]
                self._fill(fd, position, chunk)
                yield chunk.toreadonly()

    def sha256(self, read: Callable[[int], None] | None = None) -> str:
        """SHA-256 of the file, in hex; `read` is told the bytes of each part. As `read_into`."""
        digest = hashlib.sha256()
        for chunk in self.chunks(0, self.size_bytes, _DIGEST_CHUNK_BYTES):
            digest.update(chunk)
            if read is not None:
                read(len(chunk))
        return digest.hexdigest()

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _fill(self, fd: int, start: int, *buffers: memoryview) -> None:
        left = [buffer for buffer in buffers if buffer.nbytes]
        position = start
        try:
            # Linux reads at most 2 GiB per call, and any call may read less than requested.
            while left and (count := os.preadv(fd, left[:_MAX_BUFFERS], position)):
                position += count
                _drop(left, count)
            status = os.fstat(fd)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise CheckpointError(
                f"{self.path}: changed while in use ({self.size_bytes} bytes before, "
                f"{status.st_size} now); wait until nothing writes to it and start again"
            )
        if left:
            stop = position + sum(buffer.nbytes for buffer in left)
            raise CheckpointError(
                f"{self.path}: ends at byte {position}, but {stop} bytes are expected; fetch the "
                "file again"
            )


def _drop(buffers: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes from `buffers`."""
    while buffers and count >= buffers[0].nbytes:
        count -= buffers.pop(0).nbytes
    if count:
        buffers[0] = buffers[0][count:]


_TOO_MANY = "choose fewer --workers, or allow more open files (ulimit -n)"
_ADVICE = {
    errno.EMFILE: _TOO_MANY,
    errno.ENFILE: _TOO_MANY,
    errno.EIO: DISK_FAILED,
    errno.ESTALE: DISK_FAILED,
}


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    advice = _ADVICE.get(error.errno or 0, "check that the file exists, is complete and readable")
    return CheckpointError(f"{path}: cannot be read: {error.strerror}; {advice}")
