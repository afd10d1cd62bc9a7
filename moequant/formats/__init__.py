"""Reference numerics of every format: pure functions of tensors, without files or devices.

Adding a format is one file here, one line in REGISTRY, and what its numbers alone do not say;
tests/test_registries.py fails for each of these that is left out:

* `dialects/encodings.py`: an Encoding, how its parts lie on disk; and a row in the table of a
  dialect that carries it, `_SCHEMES` of compressed-tensors or `encodings` of another;
* `kernels/`: GPU kernels that read it, and `serves` of their backend, for `moequant prepare`;
* `quantizers/kernels.py`: a kernel, which a test compares with the file here; without one the
  conversion runs torch operations and warns;
* `quantizers/encoded.py`: what its codes and scales are, so that kernels read it;
* `verification/bounds.py`: how far rounding and clipping by other tools may go;
* `verification/decode.py`: its block and elements once more, written from the standards;
* `runtime/activations.py`: a scheme, if its GEMM is fed as no other format's is.

All else reads REGISTRY, the command line too. The budgets in tests/formats/test_every_format.py say
how good the format must be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moequant.errors import UnsupportedError
from moequant.formats.base import (
    Format,
    QuantizedWeight,
    StoredWeight,
    TensorSpec,
    check_tensors,
    dtype_text,
    stack,
)
from moequant.formats.fp8_block import Fp8Block
from moequant.formats.fp8_channel import Fp8Channel
from moequant.formats.fp8_tensor import Fp8Tensor
from moequant.formats.int4 import Int4
from moequant.formats.lossless import requantize_losslessly
from moequant.formats.mxfp4 import Mxfp4
from moequant.formats.mxfp8 import Mxfp8
from moequant.formats.nvfp4 import Nvfp4
from moequant.formats.plain import Bf16, Fp16, Fp32, plain_weight
from moequant.formats.squares import TILE_ROWS, sum_of_squares
from moequant.formats.tiles import dequantize_into as _dequantize_into
from moequant.formats.tiles import row_tiles as _row_tiles
from moequant.formats.tiles import tile_bytes, tile_rows
from moequant.formats.w4a8 import W4A8, effective_weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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


def get_format(name: str) -> Format:
    """The format called `name`.

    Raises:
        UnsupportedError: there is no such format; the message lists all.
    """
    if name not in REGISTRY:
        raise UnsupportedError(f"unknown format {name!r}; use one of: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def quantize(w: Tensor, format: str, *, name: str = "weight", **options: str) -> QuantizedWeight:
    """Quantize [..., N, K] to the format called `format`; see `Format.quantize`."""
    if not isinstance(w, Tensor):
        raise UnsupportedError(f"{name} is {type(w).__name__}, but must be a tensor [..., N, K]")
    return get_format(format).quantize(w, options, name=name)


def dequantize(q: QuantizedWeight) -> Tensor:
    """Decode to [..., N, K] float32: code * scale, times the global scale if there is one."""
    if not isinstance(q, QuantizedWeight):
        raise UnsupportedError(f"q is {type(q).__name__}, but must be a QuantizedWeight")
    return get_format(q.format).dequantize(q)


def dequantize_into(q: QuantizedWeight, out: Tensor) -> None:
    """Decode a weight [N, K] into `out` [N, K], rounded to its floating-point dtype.

    Needs a few MB of temporary memory, whatever the size of the weight.
    """
    _dequantize_into(q, get_format(q.format), out)


def row_tiles(
    q: QuantizedWeight, multiple: int | None = None
) -> Iterator[tuple[slice, QuantizedWeight]]:
    """Split a weight [N, K] into row tiles that fit a cache: pairs of row range and tile.

    Args:
        q: the weight.
        multiple: every tile but the last has a multiple of this many rows, which must be a multiple
            of the block's rows; by default the block's rows.
    """
    format = get_format(q.format)
    return _row_tiles(q, format, multiple or format.block[0])


def scale_block(q: QuantizedWeight) -> tuple[int, int]:
    """Rows and columns of a weight [N, K] that share a scale."""
    return get_format(q.format).block_of(q)


def signal_and_noise(before: StoredWeight, after: StoredWeight) -> tuple[float, float]:
    """Sums of squares of a weight [N, K] and of its difference from another of the same shape.

    Weights and differences are computed in float32. The second sum is 0 if and only if all numbers
    are equal. If `before` has NaN or Inf, the first sum is not finite.

    Needs a few MB of temporary memory, whatever the size of the weight.
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
    check_tensors(tensors, get_format(format).specs(shape, name), name)


__all__ = [
    "CONVERTIBLE",
    "REGISTRY",
    "RUNNABLE",
    "WRITABLE",
    "Format",
    "QuantizedWeight",
    "StoredWeight",
    "TensorSpec",
    "check_parts",
    "check_tensors",
    "dequantize",
    "dequantize_into",
    "dtype_text",
    "effective_weight",
    "float_tiles",
    "get_format",
    "plain_weight",
    "quantize",
    "requantize_losslessly",
    "row_tiles",
    "scale_block",
    "signal_and_noise",
    "stack",
    "sum_of_squares",
    "tile_bytes",
    "tile_rows",
]
