"""Machine code of kernels, kept on disk under MOEQUANT_CACHE_DIR, by default ~/.cache/moequant.

A file is a cubin and its SHA-256. One that a crash or a disk has damaged, or that this user may not
read, is replaced: the driver would refuse the former at every start, and say only that the image is
invalid.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from moequant.errors import MoequantError, SlowPathWarning
from moequant.kernels.shared_files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable

_DIGEST_BYTES = hashlib.sha256().digest_size

_WARNED: set[Path] = set()
"""Folders about which this process has warned."""


def cache_dir() -> Path:
    """The folder of MOEQUANT_CACHE_DIR; ~/.cache/moequant if that is not set, or empty.

    Raises:
        MoequantError: this user has no home folder.
    """
    chosen = Path(os.environ.get("MOEQUANT_CACHE_DIR") or "~/.cache/moequant")
    try:
        return chosen.expanduser()
    except RuntimeError as error:
        raise MoequantError(
            f"{chosen}: this user has no home folder; set MOEQUANT_CACHE_DIR to a folder for "
            "compiled kernels and tilings"
        ) from error


def cached_cubin(key: str, compile: Callable[[], bytes]) -> bytes:
    """The cubin of `key` from the disk cache; if it is not there, what `compile` makes, kept.

    Where it cannot be kept, a SlowPathWarning says so, once for a folder.

    Args:
        key: all that the cubin depends on, the compiler's version included.
        compile: makes it.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    path = cache_dir() / f"{name}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = compile()
        try:
            write_atomically(path, cubin + hashlib.sha256(cubin).digest())
        except OSError as error:
            _warn(path.parent, error)
    return cubin


def _read(path: Path) -> bytes | None:
    """The cubin of a file; None if there is none, or it is damaged or cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    cubin, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _warn(folder: Path, error: OSError) -> None:
    if folder in _WARNED:
        return
    _WARNED.add(folder)
    warnings.warn(
        f"{folder}: compiled kernels cannot be kept there ({error.strerror}), so that every "
        "process compiles them again; set MOEQUANT_CACHE_DIR to a folder that can be written",
        SlowPathWarning,
        stacklevel=1,
    )
