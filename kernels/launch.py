"""What every kernel launch shares: the interpreter, and overlap with the kernel before."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton kernels run on the CPU: no inline assembly, and no native cast to FP8."""


def overlaps_launches(device: torch.device) -> bool:
    """Whether kernels on `device` can start before the one in front ends (SM90 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Block until the kernel in front has ended, then let the kernel behind start.

    Every kernel calls this, before it reads what the kernel in front wrote and before it writes
    anything. So what comes from two kernels back may be read before the call.
    """
    if OVERLAP:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
