"""Modes of torch that a call must know of, or be kept from."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured: nothing may be read on the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """Operations of torch on `device` without autograd and without autocast."""
    with torch.no_grad():
        if not torch.amp.is_autocast_available(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield
