"""Quantize weights that lie on a GPU: what `moequant.formats` defines, by our kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.formats import Format
    from moequant.quantizers.base import Allocator

INFINITY = 0x7F800000
"""Bits of float32: what `quantize_on_device` found from here on is Inf or NaN."""


def check_columns(format: str, K: int, name: str) -> None:
    """Refuse a row that the kernels cannot hold.

    Raises:
        UnsupportedError: names the weight and the limit.
    """
    if format != "w4a8":
        return
    from moequant.kernels.quantize.w4a8 import MAX_COLUMNS

    if K > MAX_COLUMNS:
        raise UnsupportedError(
            f"{name}: K = {K}, but on a GPU w4a8 takes rows of at most {MAX_COLUMNS}; convert "
            "with --device cpu"
        )


def device_bytes(weights_bytes: int, results_bytes: int, weights: int) -> int:
    """What `quantize_on_device` takes of a device, with so many weights in one set.

    Each tensor begins at a multiple of 64 bytes: weights, their parts and the check's result.
    """
    return weights_bytes + results_bytes + 64 * (1 + 4 * weights)


def quantize_on_device(
    format: Format,
    weights: Sequence[Tensor],
    options: Mapping[str, str],
    *,
    empty: Allocator | None = None,
) -> tuple[list[QuantizedWeight], Tensor]:
    """Start what `Format.quantize_fused` does on the current stream; values are not checked.

    Args:
        format: what to make of them.
        weights: [..., N, K] each, contiguous, bfloat16, float16 or float32, of shapes the format
            takes, with the same leading dimensions.
        options: of the format, every one with its value.
        empty: gives the memory of the results, on the device of the weights; by default torch does.

    Returns:
        The results, and int32 [...]: where one is INFINITY or more, a weight holds NaN or Inf and
        the results are of no use.
    """
    empty = empty or partial(torch.empty, device=weights[0].device)
    lead = weights[0].shape[:-2] if format.has_global_scale else (1,)
    largest = empty(lead, dtype=torch.int32).zero_()
    results = [_allocate(format, w, empty) for w in weights]
    LAUNCHES[format.name](weights, results, largest, options)
    return results, largest


def _allocate(format: Format, w: Tensor, empty: Allocator) -> QuantizedWeight:
    specs = format.specs(w.shape)
    parts = {key: empty(spec.shape, dtype=spec.dtype) for key, spec in specs.items()}
    return QuantizedWeight(
        format=format.name,
        qdata=parts["qdata"],
        scale=parts["scale"],
        global_scale=parts.get("global_scale"),
        shape=w.shape,
    )


def _fp8_block(
    weights: Sequence[Tensor],
    results: Sequence[QuantizedWeight],
    largest: Tensor,
    options: Mapping[str, str],
) -> None:
    from moequant.kernels.quantize import fp8_block

    for w, q in zip(weights, results, strict=True):
        fp8_block.quantize(
            w.reshape(w.shape[:-2].numel(), *w.shape[-2:]),
            q.qdata.view(torch.uint8),
            q.scale,
            largest,
            power_of_two=options["scale"] == "power_of_two",
        )


def _nvfp4(
    weights: Sequence[Tensor],
    results: Sequence[QuantizedWeight],
    largest: Tensor,
    options: Mapping[str, str],
) -> None:
    from moequant.kernels.quantize import nvfp4

    sets = [w.reshape(largest.numel(), w.shape[-2] * w.shape[-1]) for w in weights]
    for w in sets:
        nvfp4.find_largest(w, largest)
    for w, q in zip(sets, results, strict=True):
        assert q.global_scale is not None
        nvfp4.quantize(
            w,
            q.qdata,
            q.scale.view(torch.uint8),
            q.global_scale,
            largest,
            power_of_two=options["global_scale"] == "power_of_two",
            search=options["search"] == "mse",
        )


def _mxfp4(
    weights: Sequence[Tensor],
    results: Sequence[QuantizedWeight],
    largest: Tensor,
    options: Mapping[str, str],
) -> None:
    from moequant.kernels.quantize import mxfp4

    for w, q in zip(weights, results, strict=True):
        mxfp4.quantize(
            w, q.qdata, q.scale.view(torch.uint8), largest, scale_rule=options["scale_rule"]
        )


def _w4a8(
    weights: Sequence[Tensor],
    results: Sequence[QuantizedWeight],
    largest: Tensor,
    options: Mapping[str, str],
) -> None:
    from moequant.kernels.quantize import w4a8

    for w, q in zip(weights, results, strict=True):
        w4a8.quantize(
            w, q.qdata, q.scale.view(torch.int16), largest, search=options["search"] == "mse"
        )


LAUNCHES = {"fp8_block": _fp8_block, "nvfp4": _nvfp4, "mxfp4": _mxfp4, "w4a8": _w4a8}
"""What starts the kernels of a format, by its name."""
