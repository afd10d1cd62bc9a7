"""Positional reads of a file that must stay as it was when it was opened.

Decision / failure it prevents:

* pread into the caller's buffer, never mmap / mapped pages count as memory: a conversion would
  seem to hold the whole checkpoint;
* each read opens and closes the file / hundreds of shards times several workers run out of
  descriptors; the pair costs microseconds;
* size and modification time are compared after each read / bytes of a file that is still being
  fetched, or fetched again, end in a finished conversion.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError
from moequant.storage.disk import DISK_FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_MOST_BUFFERS = 1024
"""In one call; Linux refuses more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedFile:
    """A file that is read by position, from any thread, and must not change meanwhile.

    Attributes:
        path: where it is.
        size_bytes: its size when `at` looked.
        mtime_ns: its modification time when `at` looked.
    """

    path: Path
    size_bytes: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> FixedFile:
        """The file at `path` as it is now; symlinks are followed.

        Raises:
            CheckpointError: there is no such file, or it is not a regular one.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        # Opening a named pipe would wait for a writer for ever.
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file; put the file itself there")
        return cls(path=path, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill `buffers`, writable bytes, one after the other from byte `start` of the file.

        Raises:
            CheckpointError: the file cannot be read, ends early or is no longer the same.
        """
        with self._opened() as fd:
            self._fill(fd, start, *buffers)

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes from `start` up to `stop`; errors as `read_into`."""
        return self.read_ranges([(start, stop)])

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> bytearray:
        """The bytes of each range, from a start up to a stop, joined; errors as `read_into`."""
        data = bytearray(sum(stop - start for start, stop in ranges))
        view, done = memoryview(data), 0
        with self._opened() as fd:
            for start, stop in ranges:
                self._fill(fd, start, view[done : done + stop - start])
                done += stop - start
        return data

    def chunks(self, start: int, stop: int, chunk_bytes: int) -> Iterator[memoryview]:
        """The bytes from `start` up to `stop`, at most `chunk_bytes` at a time.

        All chunks share one buffer: each is good until the next is asked for. Errors as
        `read_into`.
        """
        assert chunk_bytes > 0, chunk_bytes
        buffer = memoryview(bytearray(min(chunk_bytes, stop - start)))
        with self._opened() as fd:
            for position in range(start, stop, chunk_bytes):
                chunk = buffer[: stop - position]
                self._fill(fd, position, chunk)
                yield chunk.toreadonly()

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
            # Linux moves at most 2 GiB a call, and any call may move less than asked.
            while left and (count := os.preadv(fd, left[:_MOST_BUFFERS], position)):
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
                f"{self.path}: ends at byte {position}, but bytes up to {stop} are wanted; fetch "
                "the file again"
            )


def _drop(buffers: list[memoryview], count: int) -> None:
    """Take the first `count` bytes, which are not more than all, off `buffers`."""
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
    advice = _ADVICE.get(error.errno or 0, "see that the file is there, complete and open to you")
    return CheckpointError(f"{path}: cannot be read: {error.strerror}; {advice}")
