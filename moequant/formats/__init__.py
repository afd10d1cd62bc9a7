"""What the numbers are: pure functions of tensors, no files, no choice of device.

Adding a format is one file here and one line in REGISTRY; tests and the command line read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.formats.base import Format, QuantizedWeight, TensorSpec, stack
from moequant.formats.fp8_block import Fp8Block
from moequant.formats.mxfp4 import Mxfp4
from moequant.formats.nvfp4 import Nvfp4
from moequant.formats.w4a8 import W4A8, effective_weight

if TYPE_CHECKING:
    from torch import Tensor

REGISTRY: dict[str, Format] = {f.name: f for f in (Fp8Block(), Nvfp4(), Mxfp4(), W4A8())}


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
    return get_format(q.format).dequantize(q)


__all__ = [
    "REGISTRY",
    "Format",
    "QuantizedWeight",
    "TensorSpec",
    "dequantize",
    "effective_weight",
    "get_format",
    "quantize",
    "stack",
]
