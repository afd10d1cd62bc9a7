"""Whether a file can be written, asked before hours are spent on what will be in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moequant.errors import MoequantError
from moequant.storage.disk import explained

if TYPE_CHECKING:
    from pathlib import Path


def check_writable(path: Path) -> None:
    """Check that a file can be put at `path`, by making another beside it as writers do.

    What is there stays as it is, and nothing is left behind.

    Raises:
        MoequantError: it cannot; says what to do.
    """
    beside = path.with_name(f".{path.name}.partial")
    with explained(path, "written"):
        if path.exists() and not path.is_file():
            raise MoequantError(f"{path}: there already, and no file; choose another name")
        try:
            os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return  # another process writes it, or was killed as it did
        beside.unlink()
