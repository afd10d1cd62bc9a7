"""Allocate memory that outlives a call, also under compilers with their own memory pools."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")


def make_kept(make: Callable[[], Made], device: torch.device) -> Made:
    """Call `make` on the current stream with torch's common memory pool; returns its result.

    torch.compile(mode="reduce-overhead") runs a graph once before the capture, takes all memory of
    this thread from the graph's pool, and refuses memory that is kept afterwards
    (torch/_inductor/cudagraph_trees.py). Pools are per thread, so another thread allocates. That
    thread is not in inference mode, because inference tensors could not be written outside of it,
    and have no version counter.
    """
    if device.type != "cuda":
        with torch.inference_mode(False):  # Dynamo refuses the argument by its name
            return make()
    stream = torch.cuda.current_stream(device)

    def on_stream() -> Made:
        with torch.cuda.stream(stream), torch.no_grad():
            return make()

    with ThreadPoolExecutor(1) as other:
        return other.submit(on_stream).result()
