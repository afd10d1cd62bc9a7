"""Machine code of kernels, kept on disk under MOEQUANT_CACHE_DIR, by default ~/.cache/moequant.

A file is a cubin and its SHA-256. One that a crash or a disk has damaged is replaced: the driver
would refuse it at every start, and say only that the image is invalid.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_DIGEST_BYTES = hashlib.sha256().digest_size


def cached_cubin(key: str, compile: Callable[[], bytes]) -> bytes:
    """The cubin of `key` from the disk cache; if it is not there, what `compile` makes, kept.

    Args:
        key: all that the cubin depends on, the compiler's version included.
        compile: makes it.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    default = Path.home() / ".cache" / "moequant"
    path = Path(os.environ.get("MOEQUANT_CACHE_DIR", default)) / f"{name}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = compile()
        _store(path, cubin)
    return cubin


def _read(path: Path) -> bytes | None:
    """The cubin of a file; None if there is none, or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    cubin, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _store(path: Path, cubin: bytes) -> None:
    # A cache: where it cannot be written, the next process compiles again.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
            try:
                partial.write(cubin + hashlib.sha256(cubin).digest())
                partial.flush()
                Path(partial.name).replace(path)
            except OSError:
                Path(partial.name).unlink()
                raise
