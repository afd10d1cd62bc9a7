"""Reference numerics of every format: pure functions of tensors, without files or devices.

A format states every fact about itself in its own file; all else reads REGISTRY. CONTRIBUTING.md
lists the few other places that a new one needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats.base import (
    Format,
    QuantizedWeight,
    StoredWeight,
    TensorSpec,
    dtype_text,
    stack,
    tile_rows,
)
from moequant.formats.fp8_block import Fp8Block
from moequant.formats.fp8_channel import Fp8Channel
from moequant.formats.fp8_tensor import Fp8Tensor
from moequant.formats.int4 import Int4
from moequant.formats.lossless import requantize_losslessly
from moequant.formats.mxfp4 import Mxfp4
from moequant.formats.mxfp8 import Mxfp8
from moequant.formats.names import format_name, unknown_format
from moequant.formats.nvfp4 import Nvfp4
from moequant.formats.plain import Bf16, Fp16, Fp32, plain_weight
from moequant.formats.squares import TILE_ROWS, sum_of_squares
from moequant.formats.static_scales import check_static_scale, static_scale_of
from moequant.formats.w4a8 import W4A8, effective_weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TILE_COPIES = 8
"""Float32 copies of a tile that decoding and comparing it need."""

REGISTRY: dict[str, Format] = {
    f.name: f
    for f in (
        Fp8Block(),
        Nvfp4(),
        Mxfp4(),
        W4A8(),
        Fp8Channel(),
        Mxfp8(),
        Fp8Tensor(),
        Int4(),
        Bf16(),
        Fp16(),
        Fp32(),
    )
}

CONVERTIBLE: dict[str, Format] = {n: f for n, f in REGISTRY.items() if "convert" in f.uses}
"""Formats that weights of any source can be quantized to."""

WRITABLE: dict[str, Format] = {
    n: f for n, f in REGISTRY.items() if f.uses & {"convert", "dequantize"}
}
"""Formats that a recipe may name: CONVERTIBLE, and those to dequantize to."""

RUNNABLE: dict[str, Format] = {n: f for n, f in REGISTRY.items() if "run" in f.uses}
"""Formats that `FusedExperts` runs."""

STATIC_SCHEMES: frozenset[str] = frozenset(
    f.static_activations for f in REGISTRY.values() if f.static_activations is not None
)
"""Schemes of activations whose scales come with the weights."""


def get_format(name: str) -> Format:
    """The format called `name`.

    Raises:
        UnsupportedError: there is no such format; the message lists all.
    """
    if name not in REGISTRY:
        raise UnsupportedError(unknown_format(name, REGISTRY))
    return REGISTRY[name]


def quantize(w: Tensor, format: str, *, name: str = "weight", **options: str) -> QuantizedWeight:
    """Quantize [..., N, K] to the format called `format`; see `Format.quantize`.

    The format may have any of the names of `format_name`.
    """
    if not isinstance(w, Tensor):
        raise UnsupportedError(f"{name} is {type(w).__name__}, but must be a tensor [..., N, K]")
    return get_format(format_name(format, REGISTRY)).quantize(w, options, name=name)


def dequantize(q: QuantizedWeight) -> Tensor:
    """Decode to [..., N, K] float32: code * scale, times the global scale if there is one."""
    if not isinstance(q, QuantizedWeight):
        raise UnsupportedError(f"q is {type(q).__name__}, but must be a QuantizedWeight")
    return get_format(q.format).dequantize(q)


def dequantize_into(q: QuantizedWeight, out: Tensor) -> None:
    """Decode a weight [N, K] into `out` [N, K], rounded to its floating-point dtype.

    Needs `tile_bytes` of temporary memory, a few MB.
    """
    for rows, tile in row_tiles(q):
        out[rows] = dequantize(tile)


def row_tiles(
    q: QuantizedWeight, multiple: int | None = None
) -> Iterator[tuple[slice, QuantizedWeight]]:
    """Split a weight [N, K] into row tiles that fit a cache: pairs of row range and view.

    Args:
        q: the weight.
        multiple: every tile but the last has a multiple of this many rows, which must be a multiple
            of the block's rows, unless all rows share one; by default the fewest.
    """
    N, K = q.shape
    format = get_format(q.format)
    block_n, step = format.block[0], tile_rows(K, multiple or format.tile_multiple)
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        yield (
            rows,
            replace(
                q,
                qdata=q.qdata[rows],
                scale=q.scale[start // block_n : -(-rows.stop // block_n)],
                shape=torch.Size((rows.stop - start, K)),
            ),
        )


def tile_bytes(K: int, multiple: int) -> int:
    """Upper bound of the memory for decoding and comparing one of the `row_tiles`."""
    return _TILE_COPIES * tile_rows(K, multiple) * K * torch.float32.itemsize


def signal_and_noise(before: StoredWeight, after: StoredWeight) -> tuple[float, float]:
    """Sums of squares of a weight [N, K] and of its difference from another of the same shape.

    Weights and differences are computed in float32. The second sum is 0 if and only if all numbers
    are equal. If `before` has NaN or Inf, the first sum is not finite.
    """
    signal = noise = 0.0
    for x, y in zip(float_tiles(before), float_tiles(after), strict=True):
        signal, noise = sum_of_squares(x, signal), sum_of_squares(x - y, noise)
    return signal, noise


def float_tiles(w: StoredWeight) -> Iterator[Tensor]:
    """A weight [N, K] in float32, in the row tiles of `row_tiles(w, TILE_ROWS)`."""
    if isinstance(w, QuantizedWeight):
        for _, tile in row_tiles(w, TILE_ROWS):
            yield dequantize(tile)
    else:
        step = tile_rows(w.shape[1], TILE_ROWS)
        for start in range(0, len(w), step):
            yield w[start : start + step].float()


def check_parts(
    tensors: Mapping[str, Tensor], format: str, shape: Sequence[int], name: str
) -> None:
    """Check that `tensors` are the parts of a weight [..., N, K] of the format.

    Args:
        tensors: by field of QuantizedWeight.
        format: name of a format.
        shape: [..., N, K], logical.
        name: name of the weight for error messages.

    Raises:
        CheckpointError: a part is missing, unexpected, or of the wrong dtype or shape.
        UnsupportedError: an unknown format, or one that does not support `shape`.
    """
    specs = get_format(format).specs(shape, name)
    check_specs(
        {f"{name}.{part}": tensor for part, tensor in tensors.items()},
        {f"{name}.{part}": spec for part, spec in specs.items()},
        advice="prepare or convert the checkpoint again",
    )


def check_specs(
    tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], *, advice: str
) -> None:
    """Check that `tensors` have the dtypes and shapes in `specs`.

    Args:
        tensors: by what messages call them.
        specs: likewise.
        advice: the next step.

    Raises:
        CheckpointError: one is missing, unexpected, or of another dtype or shape.
    """
    found = {k: TensorSpec(dtype=t.dtype, shape=tuple(t.shape)) for k, t in tensors.items()}
    for name in {**specs, **found}:
        if found.get(name) != specs.get(name):
            raise CheckpointError(
                f"{name} is {found.get(name, 'missing')}, but it should be "
                f"{specs.get(name, 'missing')}; {advice}"
            )


__all__ = [
    "CONVERTIBLE",
    "REGISTRY",
    "RUNNABLE",
    "STATIC_SCHEMES",
    "WRITABLE",
    "Format",
    "QuantizedWeight",
    "StoredWeight",
    "TensorSpec",
    "check_parts",
    "check_specs",
    "check_static_scale",
    "dequantize",
    "dequantize_into",
    "dtype_text",
    "effective_weight",
    "float_tiles",
    "format_name",
    "get_format",
    "plain_weight",
    "quantize",
    "requantize_losslessly",
    "row_tiles",
    "signal_and_noise",
    "stack",
    "static_scale_of",
    "sum_of_squares",
    "tile_bytes",
    "tile_rows",
    "unknown_format",
]
