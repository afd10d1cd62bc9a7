"""Writes past the page cache.

Through it, every byte is copied into a page that is found, cleared and given back later: up to ten
times the processor time of handing the memory itself to the disk, and it drives out of the cache
what is still to be read. The file system must take part, and memory and file must lie alike:
address and position at the same place of a page.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import TYPE_CHECKING

from moequant.storage.asynchronous import WritesUnderWay
from moequant.storage.buffers import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEAST_BYTES = 1 << 18
"""Less than this the page cache gathers better than a disk."""

_FILE_SYSTEMS = {0xEF53: "ext4", 0x58465342: "XFS", 0x794C7630: "overlayfs"}
"""Those of local disks, by `f_type` of statfs; a network's gather writes in the cache."""


def open_direct(path: Path, fd: int) -> WritesUnderWay | None:
    """The file at `path`, open as `fd`, opened once more for writes past the page cache.

    None where the system or the file system has no such thing.
    """
    if not hasattr(os, "O_DIRECT") or _file_system()(fd) not in _FILE_SYSTEMS:
        return None
    try:
        second = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    try:
        return WritesUnderWay(second)
    except OSError:
        os.close(second)
        return None


def direct_part(position: int, address: int, size_bytes: int) -> tuple[int, int]:
    """Which bytes of so many can go past the cache, from and up to; (0, 0) if none.

    Args:
        position: in the file, of the first byte.
        address: in memory.
        size_bytes: how many.
    """
    start = -position % PAGE_BYTES
    stop = size_bytes - (position + size_bytes) % PAGE_BYTES
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
