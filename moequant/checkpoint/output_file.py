"""A file of known size that several threads write by position, large pieces past the page cache.

Decision / failure it prevents:

* what is lent goes from its memory to the disk (`moequant.checkpoint.direct`), by threads that do
  nothing else / a core waits for the disk, and before that copies into pages that the kernel must
  find and clear: up to ten times the processor time;
* what is small, or does not fill pages at an end of something large, is gathered and written
  through the cache at the end / one such write waits until all under way past the cache are done;
* space is reserved at the start, where the file system can / a full disk shows when the work is
  nearly done.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque
from concurrent.futures import wait
from typing import TYPE_CHECKING

from moequant.checkpoint.digest import GrowingDigest
from moequant.checkpoint.direct import direct_part, open_direct
from moequant.checkpoint.disk import explained, write_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future
    from pathlib import Path

# What file systems answer that cannot reserve space (ZFS says EINVAL).
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

KEPT_BYTES = 1 << 16
"""Less than this is not lent: the digest may come to it much later, and memory would wait."""
_GATHERED_BYTES = 4 << 20
"""At most so much waits to be written through the cache."""


class OutputFile:
    """One file in the making, with its digest.

    Several threads may write at once; `finish` and `abort` come when none of them does, for a
    descriptor that is closed may be another file's the next moment. An existing file at `path` is
    overwritten. Every OSError becomes a MoequantError that says what to do.

    Args:
        path: where.
        size_bytes: how large it will be; every byte is written once.
        disk: threads that write past the page cache, where that can be; without them, all goes
            through it.
    """

    def __init__(self, path: Path, size_bytes: int, disk: Executor | None) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._disk = disk
        self._direct: int | None = None
        self._under_way: deque[Future[None]] = deque()
        self._gathered: list[tuple[int, bytes]] = []
        self._gathered_bytes = 0
        self._noting = threading.Lock()
        with explained(path, "created"):
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._digest = GrowingDigest(self._fd)
        try:
            with explained(path, f"given its {size_bytes} bytes"):
                _reserve(self._fd, size_bytes)
            if disk is not None:
                with explained(path, "opened"):
                    self._direct = open_direct(path, self._fd)
        except BaseException:
            self.abort()
            raise

    def write(self, position: int, view: memoryview) -> None:
        """Write `view` at `position`; it may be changed afterwards."""
        if self._direct is None or view.nbytes >= KEPT_BYTES:
            self._write_cached(position, view)
            self._digest.wrote(position, position + view.nbytes)
        else:
            copy = self._gather(position, view)
            self._digest.wrote_from(position, memoryview(copy), _nothing)

    def lend(self, position: int, view: memoryview, release: Callable[[], None]) -> None:
        """As `write`; `view` must stay as it is until `release` was called for the second time."""
        self._check_written()
        start = stop = 0
        if self._disk is not None and self._direct is not None:
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            start, stop = direct_part(position, address, view.nbytes)
        if self._disk is not None and start < stop:
            inner = position + start, view[start:stop], release
            write = self._disk.submit(self._write_direct, *inner)
            with self._noting:
                self._under_way.append(write)
            self._gather(position, view[:start])
            self._gather(position + stop, view[stop:])
        else:
            self._write_cached(position, view)
            release()
        self._digest.wrote_from(position, view, release)

    def digest(self, at_most_bytes: int) -> bool:
        """Digest what the file has got since, from its start on, unless another thread is at it.

        Returns:
            Whether it was as much as that.
        """
        with explained(self.path, "read"):
            return self._digest.catch_up(at_most_bytes)

    def wait_for_disk(self) -> bool:
        """Wait until the oldest that is under way past the cache is done.

        Returns:
            Whether there was any.
        """
        oldest = self._writes()[:1]
        wait(oldest)
        self._check_written()
        return bool(oldest)

    @property
    def is_behind(self) -> bool:
        """Whether `digest` could go on, or a write past the cache is under way.

        What is lent and waits for nothing of this lies beyond a hole, until that is filled.
        """
        return self._digest.is_behind or any(not write.done() for write in self._writes())

    def finish(self) -> str:
        """Digest the rest of the file, bring it to disk and close it.

        Returns:
            Its SHA-256 in hex.
        """
        self.digest(self.size_bytes)
        wait(self._under_way)
        self._check_written()
        self._write_gathered()
        with explained(self.path, "finished"):
            os.fsync(self._descriptor())
            self._close()
        return self._digest.of_first(self.size_bytes)

    def abort(self) -> None:
        """Close it, if it is open, and remove it, if it is there."""
        with explained(self.path, "removed"):
            try:
                self._close()
            finally:
                self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        wait(self._under_way)
        for fd in (self._fd, self._direct):
            if fd is not None:
                os.close(fd)
        self._fd = self._direct = None

    def _descriptor(self) -> int:
        if self._fd is None:
            raise AssertionError(f"{self.path}: already closed")
        return self._fd

    def _write_cached(self, position: int, view: memoryview) -> None:
        with explained(self.path, "written"):
            write_all(self._descriptor(), position, view)

    def _writes(self) -> list[Future[None]]:
        """What was under way past the cache when it was last looked at, the oldest first."""
        with self._noting:
            return list(self._under_way)

    def _check_written(self) -> None:
        """Raise what a write past the cache has met; forget those that are done."""
        with self._noting:
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft().result()

    def _write_direct(self, position: int, view: memoryview, release: Callable[[], None]) -> None:
        assert self._direct is not None
        try:
            with explained(self.path, "written"):
                try:
                    write_all(self._direct, position, view)
                except OSError as error:
                    # The file system wants more than pages.
                    if error.errno != errno.EINVAL:
                        raise
                    write_all(self._descriptor(), position, view)
        finally:
            release()

    def _gather(self, position: int, view: memoryview) -> bytes:
        """A copy of `view`, which will be written at `position`."""
        copy = view.tobytes()
        with self._noting:
            self._gathered.append((position, copy))
            self._gathered_bytes += len(copy)
            full = self._gathered_bytes >= _GATHERED_BYTES
        if full:
            self._write_gathered()
        return copy

    def _write_gathered(self) -> None:
        with self._noting:
            gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        for position, data in gathered:
            self._write_cached(position, memoryview(data))


def _reserve(fd: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):  # macOS has none
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
    os.ftruncate(fd, size_bytes)


def _nothing() -> None:
    pass
