"""Lock a folder for one process at a time.

Decisions, each with the failure it prevents:

* flock, which ends with its process. A lock file left by a crash would block all later runs.
* The locked file must still be the one at its path. Otherwise, after a finished run has removed its
  folder with the lock, two others could each hold a lock: one on the removed file, one on its
  successor.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from moequant.errors import MoequantError
from moequant.storage.disk import explained

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Lock `folder`, created if missing, through `folder`/lock; the holder may remove the folder.

    `what` is the activity, for error messages: "conversion".

    Raises:
        MoequantError: another run, in this process or another, holds the lock; or locking failed.
    """
    path = folder / "lock"
    with explained(folder, "created"):
        made = _make(folder)
    with explained(path, "locked"):
        descriptor = _lock(path) if made else None
    if descriptor is None:
        raise MoequantError(f"{folder}: another {what} is running here; wait for it, or stop it")
    try:
        yield
    finally:
        os.close(descriptor)


def _make(folder: Path) -> bool:
    """Whether `folder` is there now; False if another run was making or removing it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if not folder.parent.is_dir():  # in front of it is a link to nothing
            raise
        # It was there, and then it was no folder: a file, or a folder removed in between.
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise
        return False
    return True


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None if another run has it or is removing it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # the folder was removed in the meantime
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
