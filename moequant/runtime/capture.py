"""torch's modes during a call: CUDA graph capture, autograd and autocast."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured, so that nothing may be read."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()  # a guard would take the host longer
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """Operations of torch on `device` without autograd and without autocast."""
    with torch.no_grad():
        if not torch.amp.is_autocast_available(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield
