"""What every kernel launch shares: the interpreter, and overlap with the kernel before."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton kernels run on the CPU: no inline assembly, and no native cast to FP8."""


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether kernels on `device` can start before the one in front ends (SM90 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def stream_of(device: torch.device) -> int:
    """The current stream of a CUDA device, as CUDA names it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


# How constexpr are given to a compiled kernel has changed with Triton's versions.
_RELAUNCHES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
_COMPILED: dict[tuple[Hashable, ...], Any] = {}


class Relaunch:
    """A launch that can be repeated with other tensors of the same dtypes and alignments.

    Args:
        run: launches the kernel: called with all its arguments, and a stream.
        args: the arguments, constexpr included.
    """

    __slots__ = ("_args", "_run")

    def __init__(self, run: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._run = run
        self._args = args

    def keeping_all_but(self, count: int) -> Relaunch:
        """The same without its first `count` arguments, which must then be given."""
        return Relaunch(self._run, (*(None,) * count, *self._args[count:]))

    def __call__(self, *first: Tensor, stream: int) -> None:
        """Launch on `stream` with `first` in place of as many of the first arguments."""
        self._run(*first, *self._args[len(first) :], stream=stream)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, overlap: bool, **constants: Any
) -> Relaunch | None:
    """Launch a Triton kernel on the current stream.

    As `kernel[grid](...)` does, but what Triton would compile for arguments of their kinds is
    looked up here: Triton 3.6 takes 20 to 30 us on the host to find that out in each launch.

    Args:
        kernel: its parameters are `args`, then constexpr.
        grid: programs.
        args: tensors, or integers that fit int32; their dtype, whether they lie at multiples of 16
            bytes, are 1, or are multiples of 16 is all that Triton compiles for.
        num_warps: of a program.
        overlap: whether it may start before the kernel in front has ended.
        constants: the constexpr, and options of Triton's compiler such as `maxnreg`.

    Returns:
        The launch, to be repeated; None in the interpreter and with older versions of Triton.
    """
    if INTERPRETED or not _RELAUNCHES or args[0].device.type != "cuda":
        kernel[grid](*args, **constants, num_warps=num_warps, launch_pdl=overlap)
        return None
    kinds = tuple(
        (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else (a == 1, a % 16 == 0)
        for a in args
    )
    key = (id(kernel), args[0].device, num_warps, overlap, kinds, *constants.values())
    every = (*args, *(constants[name] for name in kernel.arg_names[len(args) :]))
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = kernel[grid](*args, **constants, num_warps=num_warps, launch_pdl=overlap)
        _COMPILED[key] = compiled
        return Relaunch(compiled[(*grid, 1, 1)[:3]], every)
    again = Relaunch(compiled[(*grid, 1, 1)[:3]], every)
    again(stream=stream_of(args[0].device))
    return again


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Block until the kernel in front has ended, then let the kernel behind start.

    Every kernel calls this, before it reads what the kernel in front wrote and before it writes
    anything, but for `quantize_in_place`, which says why. So what comes from two kernels back may
    be read before the call.
    """
    if OVERLAP:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the kernel behind start before `wait_for_inputs`, while kernels in front still run.

    Only for what has a kernel behind it that, before it waits, reads nothing that kernels in front
    of this one still write.
    """
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()
