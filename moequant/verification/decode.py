"""Decode weights a second time, by tables written from the formats' definitions, in float64.

Nothing here comes from `moequant.formats`, so that a mistake there cannot hide itself.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0); OCP 8-bit Floating Point v1.0 (E4M3).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.formats import QuantizedWeight

_BLOCKS = {"fp8_block": (128, 128), "nvfp4": (1, 16), "mxfp4": (1, 32), "w4a8": (1, 128)}


def decode(q: QuantizedWeight) -> Tensor:
    """A weight [N, K] as float64, exact: code times scale times global scale."""
    N, K = q.shape
    block_n, block_k = _BLOCKS[q.format]
    scale = _values(q.scale)[torch.arange(N) // block_n][:, torch.arange(K) // block_k]
    w = _codes(q) * scale
    return w if q.global_scale is None else w * q.global_scale.double()


def _codes(q: QuantizedWeight) -> Tensor:
    if q.format == "fp8_block":
        return _values(q.qdata)
    nibble = torch.stack([q.qdata % 16, q.qdata // 16], dim=-1).reshape(q.shape)
    return (_INT4 if q.format == "w4a8" else _E2M1)[nibble.long()]


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
