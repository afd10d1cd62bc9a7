"""An independent decoder in float64, with tables written from the formats' definitions.

It does not use `moequant.formats`, so that a bug there cannot hide itself.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0); OCP 8-bit Floating Point v1.0 (E4M3).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.formats import QuantizedWeight


_ROWS = 64


def decode(q: QuantizedWeight) -> Tensor:
    """Decode a weight [N, K] to float64, exactly: code * scale * global scale.

    Raises:
        UnsupportedError: a format that is not defined here.
    """
    if q.format not in _DEFINITIONS:
        raise UnsupportedError(
            f"{q.format}: not supported by the independent decoder; define it in "
            "moequant/verification/decode.py"
        )
    element, (block_n, block_k) = _DEFINITIONS[q.format]
    N, K = q.shape
    row, column = torch.arange(N) // block_n, torch.arange(K) // block_k
    w = torch.empty(N, K, dtype=torch.float64)
    # A few rows at a time, because indices and expanded scales also take 64 bits per element.
    for start in range(0, N, _ROWS):
        rows = slice(start, start + _ROWS)
        codes = _codes(q.qdata[rows], len(element)).long()
        w[rows] = element[codes] * _values(q.scale[row[rows]])[:, column]
    return w if q.global_scale is None else w.mul_(q.global_scale.double())


def _codes(qdata: Tensor, count: int) -> Tensor:
    """Codes [N, K] uint8: a byte each, or of 16 two a byte, the even column in the low nibble."""
    stored = qdata.view(torch.uint8)
    if count == 256:
        return stored
    return torch.stack([stored % 16, stored // 16], dim=-1).flatten(-2)


def _values(stored: Tensor) -> Tensor:
    if stored.dtype == torch.float8_e4m3fn:
        return _E4M3[stored.view(torch.uint8).long()]
    if stored.dtype == torch.float8_e8m0fnu:
        return _E8M0[stored.view(torch.uint8).long()]
    return stored.double()


def _e2m1(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(magnitude, -sign)


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.copysign(magnitude, -sign)


def _e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


_E2M1 = torch.tensor([_e2m1(code) for code in range(16)], dtype=torch.float64)
_E4M3 = torch.tensor([_e4m3(code) for code in range(256)], dtype=torch.float64)
_E8M0 = torch.tensor([_e8m0(code) for code in range(256)], dtype=torch.float64)
_INT4 = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float64)
_DEFINITIONS = {
    "fp8_block": (_E4M3, (128, 128)),
    "nvfp4": (_E2M1, (1, 16)),
    "mxfp4": (_E2M1, (1, 32)),
    "w4a8": (_INT4, (1, 128)),
    "fp8_channel": (_E4M3, (1, 1 << 30)),
    "mxfp8": (_E4M3, (1, 32)),
    "fp8_tensor": (_E4M3, (1 << 30, 1 << 30)),
}
"""Value of every code, float64, and rows and columns that share a scale."""
