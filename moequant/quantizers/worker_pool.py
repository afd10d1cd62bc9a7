"""Threads that quantize, each one unit at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def worker_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads with one intra-op thread each: units are small, and workers fill the cores."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, "moequant", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        # torch passes the number on to libraries that keep one for the whole process.
        torch.set_num_threads(before)
