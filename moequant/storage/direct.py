"""Direct writes (O_DIRECT): which files allow them, and which bytes.

Through the page cache, every byte is copied into a page that must be allocated, cleared and freed.
That takes up to ten times the processor time of a direct write, and evicts source files from the
cache. The file system must support direct writes, and memory address and file position must have
the same offset in a page.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

from moequant.storage.buffers import PAGE_BYTES
from moequant.storage.disk import libc_function

if TYPE_CHECKING:
    from pathlib import Path

LEAST_BYTES = 1 << 18
"""Smaller writes are faster through the page cache."""

_FILE_SYSTEMS = {0xEF53: "ext4", 0x58465342: "XFS", 0x794C7630: "overlayfs"}
"""File systems of local disks by `f_type` of statfs; network file systems need the cache."""


def open_direct(path: Path, fd: int) -> int | None:
    """A second descriptor, for direct writes, of the file at `path` that is open as `fd`.

    None if the system or the file system does not support them.
    """
    if not hasattr(os, "O_DIRECT") or _file_system(fd) not in _FILE_SYSTEMS:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def write_direct(fd: int, position: int, view: memoryview) -> int:
    """Write `view` at `position`; returns the bytes written, none if the disk needs other sizes."""
    try:
        return os.pwrite(fd, view, position)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def direct_part(position: int, view: memoryview) -> tuple[int, int]:
    """Start and stop of the bytes of `view`, to write at `position`, that can be written directly.

    (0, 0) if there are none; the memory of `view` must be writable.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    start = -position % PAGE_BYTES
    stop = view.nbytes - (position + view.nbytes) % PAGE_BYTES
    is_aligned = (position - address) % PAGE_BYTES == 0
    return (start, stop) if is_aligned and stop - start >= LEAST_BYTES else (0, 0)


def _file_system(fd: int) -> int:
    """The `f_type` of a descriptor's file system; 0 if unknown."""
    fstatfs = libc_function("fstatfs")
    found = (ctypes.c_long * 64)()  # larger than Linux's struct statfs; f_type is first
    return found[0] if fstatfs is not None and fstatfs(fd, found) == 0 else 0
