"""Files in folders that several processes use: read whole, and changed by one at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that readers find as it was or as it is; makes its folder if there is none.

    Raises:
        OSError: it cannot be written, and is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile, which hides its files from other users, such as a server's. Random, because
    # processes of several containers may share the folder and their numbers.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Wait for others that change `path`, and let others wait; makes its folder if there is none.

    By a lock on the file `path`.lock, which stays: of a file that is removed and made again, two
    could each hold a lock. The lock itself ends with its process.

    Raises:
        OSError: it cannot be locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Only to read, which a file of another user allows.
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
