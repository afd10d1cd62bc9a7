"""One process at a time in a folder.

Decision / failure it prevents:

* flock, which ends with the process that holds it / a lock left by a crash keeps everybody out;
* the file locked must still be the one at its path / a run that is done removes its folder, lock
  and all, and two others each hold a lock: one on the file removed, one on its successor.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moequant.errors import MoequantError
from moequant.storage.disk import explained

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold `folder`, made if need be, through `folder`/lock; the holder may remove the folder.

    Args:
        folder: what is held.
        what: what its holders do, as errors call it: "conversion".

    Raises:
        MoequantError: another run holds it, in this process or another, or it cannot be locked.
    """
    path = folder / "lock"
    with explained(path, "locked"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path)
    if descriptor is None:
        raise MoequantError(f"{folder}: another {what} is at work here; wait for it, or end it")
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None if another run has it or is just leaving."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # the folder was removed since it was made
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        held = False
    except BaseException:
        os.close(descriptor)
        raise
    if held:
        return descriptor
    os.close(descriptor)
    return None
