"""The same bits in every run, on a GPU too."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Ask torch for deterministic algorithms for as long as the context lasts.

    On a CPU they are deterministic for a number of threads. On a GPU, experts add their results to
    those of others with atomic additions, in any order, unless this is asked for. Where torch has
    no such algorithm, it uses the other one.
    """
    if device.type == "cpu":
        yield
        return
    # cuBLAS reads it when it is first used; without it, its results depend on the stream.
    os.environ.setdefault(_CUBLAS, ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
