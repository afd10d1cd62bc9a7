"""SHA-256 of a file while it is being written."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import threading
from typing import TYPE_CHECKING

from moequant.storage.disk import libc_function

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK_BYTES = 1 << 18
"""Size of a read: a quarter of the second-level cache, so that it is digested from the cache."""
_FLUSH_BYTES = 8 << 20
"""Digested bytes after which a flush to disk begins."""
_SYNC_FILE_RANGE_WRITE = 2


class GrowingDigest:
    """SHA-256 of the file that is open for reading as `fd`, up to the first gap.

    Ranges may be written in any order and from any thread. Those before the first gap are digested
    from the memory they were written from, or read back. Digested ranges are flushed to disk in the
    background, which leaves little for `fsync`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._sha256 = hashlib.sha256()
        self._digested = 0
        self._flushed = 0
        self._whole = 0
        self._beyond: dict[int, int] = {}
        # Memory that a range was written from, and what to call when it is digested.
        self._kept: dict[int, tuple[memoryview, Callable[[], None]]] = {}
        self._noting = threading.Lock()
        self._digesting = threading.Lock()
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))

    def wrote(self, start: int, stop: int) -> None:
        """Record that the bytes from `start` up to `stop` are written and final."""
        with self._noting:
            self._note(start, stop)

    def wrote_from(self, start: int, memory: memoryview, release: Callable[[], None]) -> None:
        """As `wrote`, for bytes of `memory`, which must not change until `release` is called."""
        with self._noting:
            if memory.nbytes:
                self._kept[start] = memory, release
            self._note(start, start + memory.nbytes)

    def forget(self, start: int, data: bytes) -> None:
        """Free `data`, written at `start`; if it is not digested yet, it will be read back.

        Otherwise small pieces, most of some files, would stay in memory for long.
        """
        with self._noting:
            kept = self._kept.get(start)
            if kept is not None and kept[0].obj is data:
                self._kept.pop(start, None)  # the digesting thread may have taken it

    def catch_up(self, at_most_bytes: int) -> bool:
        """Digest up to the first gap; does nothing if another thread is digesting.

        Returns whether the limit was reached; ranges in memory are digested even beyond it.
        """
        if not self._digesting.acquire(blocking=False):
            return False
        try:
            last = self._digested + at_most_bytes
            while self._digested < min(self._whole, last):
                kept = self._kept.pop(self._digested, None)
                if kept is None:
                    with self._noting:
                        stop = min(self._whole, last, *self._kept)
                    self._read_back(stop)
                else:
                    memory, release = kept
                    self._sha256.update(memory)
                    self._digested += memory.nbytes
                    release()
                if self._digested - self._flushed >= _FLUSH_BYTES:
                    self._begin_flush()
            return self._digested >= last
        finally:
            self._digesting.release()

    @property
    def has_pending_bytes(self) -> bool:
        """Whether there are undigested bytes before the first gap."""
        return self._digested < self._whole

    def _note(self, start: int, stop: int) -> None:
        if start < stop:
            self._beyond[start] = stop
        while self._whole in self._beyond:
            self._whole = self._beyond.pop(self._whole)

    def _begin_flush(self) -> None:
        """Start flushing what was digested since the last call, on Linux; `fsync` reports errors.

        Without it, a conversion without direct writes takes up to a fifth longer. `posix_fadvise`
        would also work, but synchronizes all processors.
        """
        if (flush := libc_function("sync_file_range")) is not None:
            count = ctypes.c_int64(self._digested - self._flushed)
            flush(self._fd, ctypes.c_int64(self._flushed), count, _SYNC_FILE_RANGE_WRITE)
        self._flushed = self._digested

    def _read_back(self, stop: int) -> None:
        wanted = self._buffer[: stop - self._digested]
        count = os.preadv(self._fd, [wanted], self._digested)
        if count == 0:
            raise OSError(errno.EIO, "it is shorter than what was written to it")
        self._sha256.update(wanted[:count])
        self._digested += count

    def of_first(self, size_bytes: int) -> str:
        """The digest of the complete file in hex; its size must be `size_bytes`."""
        if self._digested != size_bytes:
            raise AssertionError(f"{self._digested} bytes digested of {size_bytes}")
        return self._sha256.hexdigest()
