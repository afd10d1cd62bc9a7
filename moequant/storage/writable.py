"""Check that a file can be written, before hours are spent on its content."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moequant.errors import MoequantError
from moequant.storage.disk import explained

if TYPE_CHECKING:
    from pathlib import Path


def check_writable(path: Path) -> None:
    """Check that a file can be written to `path`, by creating a temporary file next to it.

    An existing file does not change, and the temporary file is removed.

    Raises:
        MoequantError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.partial")
    with explained(path, "written"):
        if path.exists() and not path.is_file():
            raise MoequantError(f"{path}: exists and is not a file; choose another name")
        try:
            os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return  # another process is writing it, or was killed while it did
        beside.unlink()
