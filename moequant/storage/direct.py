"""Direct writes (O_DIRECT) by threads that wait for the disk.

Through the page cache, every byte is copied into a page that must be allocated, cleared and freed.
That takes up to ten times the processor time of a direct write, and evicts source files from the
cache. The file system must support direct writes, and memory address and file position must have
the same offset in a page.
"""

from __future__ import annotations

import ctypes
import errno
import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TYPE_CHECKING

from moequant.storage.buffers import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Done = Callable[[int, BaseException | None], None]

LEAST_BYTES = 1 << 18
"""Smaller writes are faster through the page cache."""

_THREADS = 2
"""One write is prepared while the disk does the other."""
_FILE_SYSTEMS = {0xEF53: "ext4", 0x58465342: "XFS", 0x794C7630: "overlayfs"}
"""File systems of local disks by `f_type` of statfs; network file systems need the cache."""


class DirectFile:
    """Writes to one file in its own threads; memory must not change until a write is done.

    Thread-safe.

    Args:
        fd: descriptor of the file, open for writing; `close` closes it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pool = ThreadPoolExecutor(_THREADS, "moequant-disk")
        self._under_way: set[Future[None]] = set()

    def begin(self, position: int, view: memoryview, done: Done) -> None:
        """Begin to write `view` at `position`.

        Args:
            position: in the file.
            view: what to write.
            done: called by another thread with the number of bytes that are written, and with the
                error if there was one.
        """
        future = self._pool.submit(self._write, position, view, done)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    @property
    def is_busy(self) -> bool:
        """Whether a write is in progress."""
        return bool(self._under_way)

    def wait(self) -> bool:
        """Wait until one of the writes in progress is done; returns whether there was any."""
        under_way = set(self._under_way)
        wait(under_way, return_when=FIRST_COMPLETED)
        return bool(under_way)

    def close(self) -> None:
        """Wait for all writes, and close the file."""
        self._pool.shutdown()
        os.close(self.fd)

    def _write(self, position: int, view: memoryview, done: Done) -> None:
        try:
            count = os.pwrite(self.fd, view, position)
        except BaseException as error:  # whoever waits shall hear of it
            done(0, error)
        else:
            done(count, None)


def open_direct(path: Path, fd: int) -> DirectFile | None:
    """Open the file at `path`, already open as `fd`, for direct writes.

    None if the system or the file system does not support them.
    """
    if not hasattr(os, "O_DIRECT") or _file_system()(fd) not in _FILE_SYSTEMS:
        return None
    try:
        return DirectFile(os.open(path, os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def direct_part(position: int, view: memoryview) -> tuple[int, int]:
    """Start and stop of the bytes of a writable `view` that can be written directly; or (0, 0).

    Args:
        position: file position of the first byte.
        view: the bytes to write.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = -position % PAGE_BYTES
    stop = view.nbytes - (position + view.nbytes) % PAGE_BYTES
    is_aligned = (position - address) % PAGE_BYTES == 0
    return (start, stop) if is_aligned and stop - start >= LEAST_BYTES else (0, 0)


@cache
def _file_system() -> Callable[[int], int]:
    """A function from a descriptor to the `f_type` of its file system; 0 if unknown."""
    try:
        fstatfs = ctypes.CDLL(None).fstatfs
    except (AttributeError, OSError, TypeError):
        return lambda fd: 0

    def f_type(fd: int) -> int:
        found = (ctypes.c_long * 64)()  # larger than Linux's struct statfs; f_type is first
        return found[0] if fstatfs(fd, found) == 0 else 0

    return f_type
