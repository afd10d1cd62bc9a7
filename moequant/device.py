"""Devices to compute on, checked before anything else is done."""

from __future__ import annotations

from pathlib import Path

import torch

from moequant.errors import UnsupportedError

_OTHER_DEVICE = (
    'choose one that this machine and this build of torch have, such as "cpu" (--device cpu)'
)
_MEMORY = Path("/proc/meminfo")
"""Linux's figures, in KiB."""


def usable_device(device: torch.device | str, *, advice: str = _OTHER_DEVICE) -> torch.device:
    """The device, checked to be usable with this machine and this build of torch.

    Args:
        device: which.
        advice: what the error says to do where there is none such.

    Raises:
        UnsupportedError: it is not; says why.
    """
    if not isinstance(device, torch.device | str):
        raise UnsupportedError(f"device is {device!r}, but must be a torch.device or its name")
    try:
        # With its index, which `torch.device("cuda")` leaves open.
        return torch.empty(1, device=torch.device(device)).device
    # What torch raises depends on the kind of device: for CUDA it is an AssertionError.
    except (AssertionError, ImportError, RuntimeError, TypeError) as error:
        reason = _no_cuda(device) or _reason(str(error))
        raise UnsupportedError(
            f"device {str(device)!r} cannot be used: {reason}; {advice}"
        ) from error


def free_bytes(device: torch.device) -> int | None:
    """The memory of a device that is free, or can be freed; None if that is not known."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu" or not _MEMORY.is_file():
        return None
    stated = (line.split() for line in _MEMORY.read_text().splitlines())
    return next((1024 * int(kib[0]) for name, *kib in stated if name == "MemAvailable:"), None)


def _no_cuda(device: torch.device | str) -> str | None:
    """That torch is built without CUDA, where a CUDA device is meant."""
    built = torch.version.cuda is not None or torch.version.hip is not None
    if built or str(device).partition(":")[0] != "cuda":
        return None
    return (
        f"torch {torch.__version__} is built without CUDA (on Linux, `pip install torch` installs "
        "it with CUDA)"
    )


def _reason(message: str) -> str:
    """What torch says, without its dispatcher's part and the kinds of devices of other builds."""
    first = message.split("\n")[0].split(". ")[0]
    return "torch knows no such kind of device" if first.startswith("Expected one of") else first
