"""Requirements of backends on CUDA devices."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from moequant.kernels.cuda_driver import why_no_compiler

if TYPE_CHECKING:
    from collections.abc import Callable

    from moequant.runtime.workload import Workload

TMA_STRIDE_BYTES = 16
"""The stride between rows that TMA reads is a multiple of it."""


def why_not_kernels_for(
    workload: Workload, formats: tuple[str, ...], *, activations: tuple[str, ...]
) -> str | None:
    """Why CUDA kernels for `formats` do not run `workload` on any GPU; None if they do.

    Args:
        workload: the layer.
        formats: names of formats.
        activations: the schemes that the kernels take.
    """
    if workload.format not in formats:
        return f"runs only {' and '.join(formats)}"
    if workload.activations not in activations:
        wanted = f"in {' or '.join(activations)}"
        if activations == ("none",):
            wanted = "that are not quantized"
        return f"takes only activations {wanted}"
    if workload.experts == 0:
        return "needs at least one expert"
    return None if workload.device.type == "cuda" else "needs a CUDA device"


def why_not_multiples(workload: Workload, multiples: tuple[int, int]) -> str | None:
    """Why H and I are no multiples of the two in `multiples`; None if they are."""
    sizes = {"H": workload.hidden, "I": workload.intermediate}
    for (name, size), multiple in zip(sizes.items(), multiples, strict=True):
        if size % multiple:
            return f"needs {name} to be a multiple of {multiple}, not {size}"
    return None


def why_not_capable(
    device: torch.device, wanted: str, suits: Callable[[tuple[int, int]], bool]
) -> str | None:
    """Why the compute capability of `device` does not suit; None where it does.

    Args:
        device: a CUDA device, which need not be there.
        wanted: what would, in words.
        suits: whether a capability (major, minor) does.
    """
    if not torch.cuda.is_available():
        return "finds no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if suits((major, minor)):
        return None
    return f"needs compute capability {wanted}, and {device} has {major}.{minor}"


def why_not_sm90(device: torch.device) -> str | None:
    """Why `device` is no Hopper, for which WGMMA code is compiled; None where it is."""
    return why_not_capable(device, "9.0", lambda capability: capability == (9, 0))


def why_not_sm90_triton(device: torch.device) -> str | None:
    """Why `device` is no Hopper, or Triton is not installed; None where both are there."""
    if (reason := why_not_sm90(device)) is not None:
        return reason
    return why_no_triton()


def why_no_triton() -> str | None:
    """Why Triton kernels cannot be compiled; None where the package is there."""
    return "needs the package triton" if find_spec("triton") is None else None


@cache
def why_not_sm90_nvrtc(device: torch.device) -> str | None:
    """Why `device` cannot run a backend of NVRTC and Triton kernels for SM90; None if it can."""
    return why_not_sm90_triton(device) or why_no_compiler()
