"""Whether a CUDA graph is being captured: then nothing may be read on the host."""

from __future__ import annotations

import torch


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
