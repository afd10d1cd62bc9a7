"""Kernels that CuTe DSL compiled, kept on disk and loaded.

CuTe DSL only makes the cubin. It is kept like those of NVRTC and launched by `Launch`, so a process
that finds it on disk imports nothing of CUTLASS, and a launch costs what the others cost.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from moequant.kernels.cubin_cache import cached_cubin
from moequant.kernels.cuda_driver import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMPILER = "nvidia-cutlass-dsl-libs-base"
"""The distribution whose version is that of CuTe DSL, by whatever name it was installed."""


def compile_once(variant: object, sources: Sequence[str], compiler: Callable[[], bytes]) -> bytes:
    """The cubin of a kernel, from the disk cache if it is there.

    Args:
        variant: what it is compiled for; its repr says all of it.
        sources: files of this folder that it is made from.
        compiler: makes it.
    """
    texts = [(Path(__file__).parent / name).read_text("utf-8") for name in sources]
    return cached_cubin("\0".join([*texts, repr(variant), version(COMPILER)]), compiler)


def entry_of(cubin: bytes) -> str:
    """The name of the one kernel in `cubin`, whose code is the section .text.NAME.

    Raises:
        AssertionError: there is not exactly one.
    """
    names = set(re.findall(rb"\0\.text\.(\w+)\0", cubin))
    assert len(names) == 1, names
    return str(names.pop(), "ascii")


def load(cubin: bytes, *, threads: int, shared_bytes: int) -> Kernel:
    """The one kernel in `cubin`, on the current device.

    Args:
        cubin: see `compile_once`.
        threads: of a CTA.
        shared_bytes: its dynamic shared memory.
    """
    return Kernel.load(
        cubin, entry_of(cubin), threads=threads, shared_bytes=shared_bytes, cluster=1
    )
