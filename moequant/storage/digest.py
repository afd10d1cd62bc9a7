"""SHA-256 of a file that is still being written."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import threading
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK_BYTES = 1 << 18
"""Read at a time: a quarter of the second-level cache, so that it is digested from there."""
_FLUSH_BYTES = 8 << 20
"""Sent to disk at a time, once digested."""
_SYNC_FILE_RANGE_WRITE = 2


class _Kept(NamedTuple):
    """The memory a range was written from, and what to call once it is digested."""

    memory: memoryview
    release: Callable[[], None]


class GrowingDigest:
    """SHA-256 over the file's bytes as far as they have been written.

    Ranges may be written in any order and from any thread; those in front of the first hole can be
    digested: from the memory they were written from, where that is kept, else read back. What is
    digested begins its way to disk, which leaves little for `fsync` to wait for.

    Args:
        fd: of the file, open for reading.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._sha256 = hashlib.sha256()
        self._digested = 0
        self._flushed = 0
        self._whole = 0
        self._beyond: dict[int, int] = {}
        self._kept: dict[int, _Kept] = {}
        self._noting = threading.Lock()
        self._digesting = threading.Lock()
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))

    def wrote(self, start: int, stop: int) -> None:
        """Note that the bytes from `start` up to `stop` are there, and will not change."""
        with self._noting:
            self._note(start, stop)

    def wrote_from(self, start: int, memory: memoryview, release: Callable[[], None]) -> None:
        """As `wrote`, of what `memory` holds and keeps holding until `release` is called."""
        with self._noting:
            if memory.nbytes:
                self._kept[start] = _Kept(memory, release)
            self._note(start, start + memory.nbytes)

    def forget(self, start: int, data: bytes) -> None:
        """Read back what was written from `data` at `start`, if it is not digested by now.

        The digest may come to it much later, and what is small is most of some files.
        """
        with self._noting:
            kept = self._kept.get(start)
            if kept is not None and kept.memory.obj is data:
                self._kept.pop(start, None)  # who digests takes it without asking

    def catch_up(self, at_most_bytes: int) -> bool:
        """Digest what is in front of the first hole; nothing if another thread is at it.

        Memory that is kept is digested whole, even beyond the limit.

        Returns:
            Whether the limit was reached.
        """
        if not self._digesting.acquire(blocking=False):
            return False
        try:
            last = self._digested + at_most_bytes
            while self._digested < min(self._whole, last):
                kept = self._kept.pop(self._digested, None)
                if kept is None:
                    self._read_back(self._next_kept(min(self._whole, last)))
                else:
                    self._sha256.update(kept.memory)
                    self._digested += kept.memory.nbytes
                    kept.release()
                if self._digested - self._flushed >= _FLUSH_BYTES:
                    _begin_flush()(self._fd, self._flushed, self._digested - self._flushed)
                    self._flushed = self._digested
            return self._digested >= last
        finally:
            self._digesting.release()

    @property
    def is_behind(self) -> bool:
        """Whether there is anything in front of the first hole that is not digested yet."""
        return self._digested < self._whole

    def _note(self, start: int, stop: int) -> None:
        if start < stop:
            self._beyond[start] = stop
        while self._whole in self._beyond:
            self._whole = self._beyond.pop(self._whole)

    def _next_kept(self, stop: int) -> int:
        with self._noting:
            return min(stop, *self._kept, stop)

    def _read_back(self, stop: int) -> None:
        wanted = self._buffer[: stop - self._digested]
        count = os.preadv(self._fd, [wanted], self._digested)
        if count == 0:
            raise OSError(errno.EIO, "it ends before what was written to it")
        self._sha256.update(wanted[:count])
        self._digested += count

    def of_first(self, size_bytes: int) -> str:
        """The digest in hex, once the file is whole; its size must be `size_bytes`."""
        if self._digested != size_bytes:
            raise AssertionError(f"{self._digested} bytes digested of {size_bytes}")
        return self._sha256.hexdigest()


@cache
def _begin_flush() -> Callable[[int, int, int], None]:
    """Begin to write a range of a file to disk, without waiting: fd, offset and length.

    Linux's sync_file_range, which Python does not offer. `posix_fadvise` would do it too, but waits
    for every processor. Elsewhere nothing; errors are for `fsync` to report.
    """
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return lambda fd, offset, length: None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return lambda fd, offset, length: call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)
