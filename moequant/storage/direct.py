"""Writes past the page cache, by threads that wait for the disk.

Through the cache, every byte is copied into a page that is found, cleared and given back later: up
to ten times the processor time of handing the memory itself to the disk, and it drives out of the
cache what is still to be read. The file system must take part, and memory and file must lie alike:
address and position at the same place of a page.
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
"""Less than this the page cache gathers better than a disk."""

_THREADS = 2
"""One write is prepared while the disk does the other."""
_FILE_SYSTEMS = {0xEF53: "ext4", 0x58465342: "XFS", 0x794C7630: "overlayfs"}
"""Those of local disks, by `f_type` of statfs; a network's gather writes in the cache."""


class DirectFile:
    """Writes to one file in threads of its own, from memory that stays as it is until then.

    Safe to use from several threads.

    Args:
        fd: of the file, open for writing; it is closed by `close`.
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
        """Whether a write is under way."""
        return bool(self._under_way)

    def wait(self) -> bool:
        """Wait until a write that is under way is done; whether there was any."""
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
    """The file at `path`, open as `fd`, opened once more for writes past the page cache.

    None where the system or the file system has no such thing.
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
    """Which bytes of a writable `view` can go past the cache, from and up to; (0, 0) if none.

    Args:
        position: in the file, of the first byte.
        view: what is to be written there.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = -position % PAGE_BYTES
    stop = view.nbytes - (position + view.nbytes) % PAGE_BYTES
    alike = (position - address) % PAGE_BYTES == 0
    return (start, stop) if alike and stop - start >= LEAST_BYTES else (0, 0)


@cache
def _file_system() -> Callable[[int], int]:
    """`f_type` of the file system of a descriptor, which Python does not tell; 0 if unknown."""
    try:
        fstatfs = ctypes.CDLL(None).fstatfs
    except (AttributeError, OSError, TypeError):
        return lambda fd: 0

    def f_type(fd: int) -> int:
        found = (ctypes.c_long * 64)()  # more than any Linux's struct; f_type comes first
        return found[0] if fstatfs(fd, found) == 0 else 0

    return f_type
