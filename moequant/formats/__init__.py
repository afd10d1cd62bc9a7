"""What the numbers are: pure functions of tensors, no files, no choice of device.

Adding a format is one file here, one line in REGISTRY, and what its numbers alone do not say;
tests/test_registries.py fails for each of these that is left out:

* `dialects/encodings.py`: an Encoding, how its parts lie on disk; and a row in the table of a
  dialect that carries it, `_SCHEMES` of compressed-tensors or `encodings` of another;
* `layouts/targets.py`: a row for each target whose kernels take it;
* `quantizers/kernels.py`: a kernel, which a test compares with the file here; without one the
  conversion runs torch operations and warns;
* `verification/bounds.py`: how far rounding and clipping by other tools may go;
* `verification/decode.py`: its block and elements once more, written from the standards;
* `runtime/activations.py`: a scheme, if its GEMM is fed as no other format's is.

All else reads REGISTRY, the command line too. The budgets in tests/formats/test_every_format.py say
how good the format must be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.formats.base import (
    Format,
    QuantizedWeight,
    TensorSpec,
    check_tensors,
    dtype_text,
    stack,
)
from moequant.formats.fp8_block import Fp8Block
from moequant.formats.mxfp4 import Mxfp4
from moequant.formats.nvfp4 import Nvfp4
from moequant.formats.recode import recode
from moequant.formats.stored import Fp8Channel, Int4, StoredFormat
from moequant.formats.tiles import Decoder, tile_bytes, tile_rows
from moequant.formats.tiles import dequantize_into as _dequantize_into
from moequant.formats.tiles import row_tiles as _row_tiles
from moequant.formats.w4a8 import W4A8, effective_weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

REGISTRY: dict[str, Format] = {f.name: f for f in (Fp8Block(), Nvfp4(), Mxfp4(), W4A8())}


_STORED: dict[str, StoredFormat] = {f.name: f for f in (Fp8Channel(), Int4())}


def get_format(name: str) -> Format:
    """The format called `name`.

    Raises:
        UnsupportedError: there is none; lists those there are.
    """
    if name not in REGISTRY:
        raise UnsupportedError(f"no format is called {name!r}; there are: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def quantize(w: Tensor, format: str, *, name: str = "weight", **options: str) -> QuantizedWeight:
    """Quantize [..., N, K] to the format called `format`; see `Format.quantize`."""
    return get_format(format).quantize(w, options, name=name)


def dequantize(q: QuantizedWeight) -> Tensor:
    """Decode to [..., N, K] float32: code times scale, and times global scale if there is one."""
    return _decoder(q.format).dequantize(q)


def _decoder(name: str) -> Decoder:
    return _STORED[name] if name in _STORED else get_format(name)


def dequantize_into(q: QuantizedWeight, out: Tensor) -> None:
    """Decode a weight [N, K] into `out`, [N, K] of any floating-point dtype, rounded to that.

    Takes a few MB besides, whatever the weight.
    """
    _dequantize_into(q, _decoder(q.format), out)


def row_tiles(
    q: QuantizedWeight, multiple: int | None = None
) -> Iterator[tuple[slice, QuantizedWeight]]:
    """Parts of a weight [N, K] that stay in a cache: which rows, and what decodes to them.

    Args:
        q: the weight.
        multiple: all but the last have a multiple of so many rows, itself one of the rows of a
            block; these by default.
    """
    format = _decoder(q.format)
    return _row_tiles(q, format, multiple or format.block[0])


def check_parts(
    tensors: Mapping[str, Tensor], format: str, shape: Sequence[int], name: str
) -> None:
    """Refuse parts that are not those of a weight [..., N, K] of the format called `format`.

    Args:
        tensors: by field of QuantizedWeight.
        format: name of a format.
        shape: [..., N, K], logical.
        name: what errors call the weight.

    Raises:
        CheckpointError: a part is missing, one too many, or of the wrong dtype or shape.
        UnsupportedError: no format is called that, or it cannot hold `shape`.
    """
    check_tensors(tensors, get_format(format).specs(shape, name), name)


__all__ = [
    "REGISTRY",
    "Format",
    "QuantizedWeight",
    "TensorSpec",
    "check_parts",
    "check_tensors",
    "dequantize",
    "dequantize_into",
    "dtype_text",
    "effective_weight",
    "get_format",
    "quantize",
    "recode",
    "row_tiles",
    "stack",
    "tile_bytes",
    "tile_rows",
]
