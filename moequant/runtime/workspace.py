"""Scratch memory of a call: one buffer per device, stream and thread, shared by all layers.

The layers that a thread runs on a stream run in sequence, so they can share a buffer. Two threads
cannot, because their launches may interleave. The buffer grows to the largest size requested, and
keeps its address until it grows, so that a backend may cache what it derives from the address. What
is cached, such as plans, has views of the buffer: after it has grown, the memory of the smaller one
is freed once every layer that used it has been called again. A call that a CUDA graph captures gets
its own memory from the graph's pool, because replays on different streams may overlap.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from moequant.runtime.capture import capturing
from moequant.runtime.kept_memory import make_kept


class _Buffers(threading.local):
    """The workspaces of the current thread, by device index and stream; let go of when it ends."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], Tensor] = {}


_BUFFERS = _Buffers()


def shared_workspace(device: torch.device, size_bytes: int) -> Tensor:
    """At least `size_bytes` bytes, uint8, for this thread and the current stream of `device`.

    They are not initialized.
    """
    if device.type != "cuda" or capturing(device):
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    buffers = _BUFFERS.by_stream
    buffer = buffers.get(key)
    if buffer is None or buffer.numel() < size_bytes:
        # Before the new one is taken: if no plan holds the old one's memory, it is free for it.
        buffers.pop(key, None)
        buffer = None
        buffer = make_kept(
            lambda: torch.empty(size_bytes, dtype=torch.uint8, device=device), device
        )
        buffers[key] = buffer
    return buffer
