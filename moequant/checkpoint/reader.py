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

import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer`, writable bytes, from byte `start` of the file.

        Raises:
            CheckpointError: the file cannot be read, ends early or is no longer the same.
        """
        with self._opened() as fd:
            self._fill(fd, start, buffer)

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes from `start` up to `stop`; errors as `read_into`."""
        data = bytearray(stop - start)
        self.read_into(start, memoryview(data))
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

    def _fill(self, fd: int, start: int, buffer: memoryview) -> None:
        done = 0
        try:
            # Linux moves at most 2 GiB a call, and any call may move less than asked.
            while done < buffer.nbytes:
                count = os.preadv(fd, [buffer[done:]], start + done)
                if count == 0:
                    break
                done += count
            status = os.fstat(fd)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise CheckpointError(
                f"{self.path}: changed while in use ({self.size_bytes} bytes before, "
                f"{status.st_size} now); wait until nothing writes to it and start again"
            )
        if done < buffer.nbytes:
            raise CheckpointError(
                f"{self.path}: ends at byte {start + done}, but bytes up to "
                f"{start + buffer.nbytes} are wanted; fetch the file again"
            )


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror}; see that the file is there, complete and "
        "open to you"
    )
