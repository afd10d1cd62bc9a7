"""Linear algebra of torch, for several threads."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_LOADING = threading.Lock()
_loaded: set[str] = set()
"""Types of devices."""


def cholesky(H: Tensor) -> Tensor | None:
    """The lower Cholesky factor of a symmetric matrix; any number of threads may call it.

    Args:
        H: [K, K] float32 or float64, on any device; only its lower triangle is read.

    Returns:
        [K, K] lower triangular, H = L Lt; None if H is not positive definite.
    """
    _load(H.device)
    lower, fault = torch.linalg.cholesky_ex(H)
    return None if int(fault) != 0 else lower


def _load(device: torch.device) -> None:
    """Let torch load its linear algebra for a type of device, in one thread.

    For CUDA that is a library of its own, which torch loads in the first call. Another thread that
    calls while it is being loaded gets "lazy wrapper should be called at most once".
    """
    if device.type in _loaded:
        return
    with _LOADING:
        if device.type not in _loaded:
            torch.linalg.cholesky_ex(torch.ones((1, 1), dtype=torch.float64, device=device))
            _loaded.add(device.type)
