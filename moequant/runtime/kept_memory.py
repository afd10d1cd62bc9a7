"""Memory that outlives a call, under compilers that have memory pools of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")


def make_kept(make: Callable[[], Made], device: torch.device) -> Made:
    """What `make` returns, with memory from torch's common pool; `make` runs on the current stream.

    torch.compile(mode="reduce-overhead") runs a graph once before it captures it, with everything
    that this thread allocates taken from the graph's pool, and refuses whatever of that is kept
    (torch/_inductor/cudagraph_trees.py). Pools are chosen by thread, so another one allocates.
    Inference mode, a thread's own too, is off in it: tensors made in that mode could not be written
    to outside of it, nor be seen to change.
    """
    if device.type != "cuda":
        with torch.inference_mode(mode=False):
            return make()
    stream = torch.cuda.current_stream(device)

    def on_stream() -> Made:
        with torch.cuda.stream(stream), torch.no_grad():
            return make()

    with ThreadPoolExecutor(1) as other:
        return other.submit(on_stream).result()
