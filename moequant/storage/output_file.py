"""A file of known size that several threads write by position, large pieces directly to disk.

Decisions, each with the failure it prevents:

* Large pieces are written directly to disk (`moequant.storage.direct`) while the worker continues.
  Otherwise a core would wait for the disk, after copying into pages that the kernel must allocate
  and clear: up to ten times the processor time.
* Small pieces, and ends of large ones that do not fill pages, are gathered and written through the
  cache later, adjacent ones together. Otherwise there would be thousands of calls for a few bytes.
* Space is reserved at the start, if the file system supports it, so that a full disk is detected
  before the work.
"""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from moequant.storage.digest import GrowingDigest
from moequant.storage.direct import direct_part, open_direct, write_direct
from moequant.storage.disk import explained, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

# Errors of file systems that cannot reserve space (ZFS returns EINVAL).
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

SHARED_BYTES = 1 << 16
"""Smaller pieces are copied: the digest may reach them much later, and would hold their memory."""
_GATHERED_BYTES = 4 << 20
"""Maximum size of the gathered pieces."""
_DIRECT_WRITES = 2
"""Direct writes at once: one is prepared while the disk does the other."""


class OutputFile:
    """A file that is being written, and its digest; each of its bytes is written exactly once.

    Several threads may write at once, but not during `finish` and `abort`, because a closed
    descriptor may be reused for another file. An existing file at `path` is overwritten. Every
    OSError becomes a MoequantError with advice.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._direct_fd: int | None = None
        self._disk = ThreadPoolExecutor(_DIRECT_WRITES, "moequant-disk")
        self._under_way: set[Future[None]] = set()
        self._failure: BaseException | None = None
        self._gathered: list[tuple[int, bytes]] = []
        self._gathered_bytes = 0
        self._noting = threading.Lock()
        with explained(path, "created"):
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._digest = GrowingDigest(self._fd)
        try:
            with explained(path, f"given its {size_bytes} bytes"):
                reserve(self._fd, size_bytes)
            with explained(path, "opened"):
                self._direct_fd = open_direct(path, self._fd)
        except BaseException:
            self.abort()
            raise

    def write_copied(self, position: int, view: memoryview) -> None:
        """Write `view` at `position`; it may be changed afterwards."""
        if self._direct_fd is None or view.nbytes >= SHARED_BYTES:
            self._write_cached(position, view)
            self._digest.wrote(position, position + view.nbytes)
        else:
            copy = view.tobytes()
            self._digest.wrote_from(position, memoryview(copy), nothing)
            self._gather(position, copy)

    def write_shared(self, position: int, view: memoryview, release: Callable[[], None]) -> None:
        """As `write_copied`, without a copy of `view`.

        It must stay as it is until `release` was called twice, for the disk and for the digest.
        """
        self._raise_failure()
        start, stop = direct_part(position, view)
        if self._direct_fd is not None and start < stop:
            inner = position + start, view[start:stop]
            future = self._disk.submit(self._write_direct, self._direct_fd, *inner, release)
            self._under_way.add(future)
            future.add_done_callback(self._under_way.discard)
            self._gather(position, view[:start].tobytes())
            self._gather(position + stop, view[stop:].tobytes())
        else:
            self._write_cached(position, view)
            release()
        self._digest.wrote_from(position, view, release)

    def digest(self, at_most_bytes: int) -> bool:
        """As `GrowingDigest.catch_up`."""
        with explained(self.path, "read"):
            return self._digest.catch_up(at_most_bytes)

    def wait_for_disk(self) -> bool:
        """Wait until one of the direct writes in progress is done; whether there was any."""
        under_way = set(self._under_way)
        wait(under_way, return_when=FIRST_COMPLETED)
        self._raise_failure()
        return bool(under_way)

    @property
    def has_pending_work(self) -> bool:
        """Whether `digest` could go on, or a direct write is in progress.

        What waits for neither lies beyond a gap, until that is filled.
        """
        return self._digest.has_pending_bytes or bool(self._under_way)

    def finish(self) -> tuple[int, str]:
        """Digest the rest, fsync and close; returns size in bytes and SHA-256 in hex."""
        self.digest(self.size_bytes)
        while self.wait_for_disk():
            pass
        self._write_gathered()
        with explained(self.path, "finished"):
            os.fsync(self._descriptor())
            self._close()
        return self.size_bytes, self._digest.of_first(self.size_bytes)

    def abort(self) -> None:
        """Close the file if it is open, and remove it if it exists."""
        with explained(self.path, "removed"):
            try:
                self._close()
            finally:
                self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        self._disk.shutdown()
        for fd in (self._direct_fd, self._fd):
            if fd is not None:
                os.close(fd)
        self._fd = self._direct_fd = None

    def _descriptor(self) -> int:
        if self._fd is None:
            raise AssertionError(f"{self.path}: already closed")
        return self._fd

    def _write_cached(self, position: int, view: memoryview) -> None:
        with explained(self.path, "written"):
            write_all(self._descriptor(), position, view)

    def _raise_failure(self) -> None:
        """Raise the error of an earlier direct write."""
        if self._failure is not None:
            raise self._failure

    def _write_direct(
        self, fd: int, position: int, view: memoryview, release: Callable[[], None]
    ) -> None:
        """Write past the cache, and through it what is left; errors are for waiting threads."""
        try:
            with explained(self.path, "written"):
                count = write_direct(fd, position, view)
            self._write_cached(position + count, view[count:])
        except BaseException as failure:
            self._failure = failure
        finally:
            release()

    def _gather(self, position: int, data: bytes) -> None:
        """Write `data` at `position` later."""
        with self._noting:
            self._gathered.append((position, data))
            self._gathered_bytes += len(data)
            full = self._gathered_bytes >= _GATHERED_BYTES
        if full:
            self._write_gathered()

    def _write_gathered(self) -> None:
        with self._noting:
            gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        for position, joined in _joined(sorted(gathered)):
            self._write_cached(position, memoryview(joined))
        for position, data in gathered:
            self._digest.forget(position, data)


def reserve(fd: int, size_bytes: int) -> None:
    """Give an open file its size, and space on the disk where the file system can reserve it."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
    os.ftruncate(fd, size_bytes)


def _joined(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytearray]]:
    """Sorted pieces, with adjacent ones joined."""
    start, joined = 0, bytearray()
    for position, data in pieces:
        if position != start + len(joined):
            yield start, joined
            start, joined = position, bytearray()
        joined += data
    yield start, joined


def nothing() -> None:
    """A release callback that does nothing."""
