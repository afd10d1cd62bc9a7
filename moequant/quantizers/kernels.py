"""The functions of the native quantizer by format: what `Format.quantize` does, on vectors.

Every function takes the same parameters and returns the largest magnitude of the weights, as the
bits of the source dtype without their sign: NaN and Inf are those that reach `Source.infinity`.
What it has written by then is of no use.

Where these differ from the reference in more than the order of independent operations:

* products with the reciprocal of a power of two replace quotients: the reciprocal is a normal
  float32, so both are the same real number, rounded once;
* so do products with other reciprocals where the few bits of a weight rule out another code;
* signs are put aside: rounding to nearest is symmetric, and so are quotients by positive numbers;
* magnitudes are compared as unsigned integers, whose order is that of the floats they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.native_code import UnavailableError
from moequant.native_code.vectors import I64, Type
from moequant.quantizers.fp8_kernel import Fp8Kernel
from moequant.quantizers.group_kernels import E8m0Kernel, Nvfp4Kernel
from moequant.quantizers.operands import new_kernel
from moequant.quantizers.w4a8_kernel import W4a8Kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.formats import Format
    from moequant.native_code.vectors import Function
    from moequant.quantizers.elements import Source
    from moequant.quantizers.native_kernel import NativeKernel

_STRIP = 128
"""Weights that `amax` reads at a time."""


def amax(source: Source) -> Function:
    """The largest magnitude alone."""
    f = new_kernel()
    largest = f.variable(f.constant(Type(source.element, _STRIP), 0))
    rest = f.variable(f.constant(Type(source.element, source.least_lanes), 0))
    w, count = f.parameter("w"), f.parameter("rows") * f.parameter("columns")
    for lanes, loop in f.strips(f.constant(I64, 0), count, _STRIP, source.least_lanes):
        with loop as at:
            found = largest if lanes > source.least_lanes else rest
            found.set(found.get().umax(source.magnitude(source.load(f, w, at, lanes))))
    f.give(largest.get().reduce("umax").umax(rest.get().reduce("umax")).to("i32"))
    return f


KERNELS: dict[tuple[str, torch.dtype], type[NativeKernel]] = {
    ("e4m3", torch.float32): Fp8Kernel,
    ("e4m3", torch.float8_e8m0fnu): E8m0Kernel,
    ("e2m1", torch.float8_e8m0fnu): E8m0Kernel,
    ("e2m1", torch.float8_e4m3fn): Nvfp4Kernel,
    ("int4", torch.bfloat16): W4a8Kernel,
}
"""By element and dtype of the scale."""


def quantizing_kernel(format: Format, source: Source, options: Mapping[str, str]) -> Function:
    """A function that does what `format.quantize` does, to be compiled.

    Raises:
        UnavailableError: nothing here knows such elements and scales.
    """
    kernel = _kernel_of(format)
    if kernel is None:
        raise UnavailableError(f"there is no native kernel for {format.name}")
    return kernel(format, source, options).write()


def scratch_count(format: Format, groups: int) -> int:
    """Numbers of float32 a kernel has to be given as `scratch`, for so many groups in a row."""
    kernel = _kernel_of(format)
    return 0 if kernel is None else kernel.scratch_count(groups)


def padded_importance(format: Format, importance: Tensor) -> Tensor:
    """The importances of a weight's columns [K] as the format's kernel reads them."""
    kernel = _kernel_of(format)
    return importance if kernel is None else kernel.padded_importance(importance, format.block[1])


def _kernel_of(format: Format) -> type[NativeKernel] | None:
    return KERNELS.get((format.element.name, format.scale_dtype))
