"""Lossless requantization: the same numbers in another format.

| from | to | condition | how |
|---|---|---|---|
| any | itself | no global scale, or one that all weights can share | codes and scales stay |
| fp8_tensor | itself | the weights have one scale | codes and scales stay |
| fp8_tensor | fp8_channel | | codes stay |
| mxfp4 | nvfp4 | exponents of nonzero groups differ by at most 17 | codes stay |
| int4 | w4a8 | groups of 128 columns, and scales that are BF16 numbers | codes stay |

E4M3 has the powers of two from 2**-9 to 2**8, hence the 17. MXFP4 to FP8 blocks needs no row: the
quantizer is exact if the exponents within a block differ by at most 14. For a block whose largest
number is 6 * 2**e, its scale is 2**(e - 6), so every multiple of 2**(e - 15) is representable; half
a step of a group with exponent e - 14 is such a multiple.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moequant.formats.elements import E8M0_BIAS, power_of_two
from moequant.formats.w4a8 import GROUP as W4A8_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moequant.formats.base import QuantizedWeight

_MXFP4_GROUP, _NVFP4_GROUP = 32, 16
# Powers of two in E4M3, the smallest a subnormal.
_E4M3_EXPONENTS = (-9, 8)
_LEAST_GLOBAL_EXPONENT = -126
_E8M0_NAN, _E4M3_ONE = 255, 0x38
_WORD = torch.int64
_MAGNITUDES = 0x7777777777777777
"""The bits of 16 packed E2M1 codes without their signs."""


def requantize_losslessly(
    weights: Sequence[QuantizedWeight], format: str
) -> list[QuantizedWeight] | None:
    """Requantize the weights of a fused set to the format called `format` without any error.

    Args:
        weights: [N, K] each.
        format: name of a format.

    Returns:
        Weights that decode to exactly the same numbers and share what the format makes them share;
        None if the format cannot represent them all, or no rule covers the two formats.
    """
    found = {q.format for q in weights}
    if found == {"fp8_tensor"} and format in found:
        shared = all(torch.equal(q.scale, weights[0].scale) for q in weights)
        return list(weights) if shared else None
    if found == {format}:
        return _with_one_global_scale(weights)
    if found == {"fp8_tensor"} and format == "fp8_channel":
        return [replace(q, format=format, scale=q.scale.expand(len(q.qdata), 1)) for q in weights]
    if found == {"mxfp4"} and format == "nvfp4":
        return _mxfp4_as_nvfp4(weights)
    if found == {"int4"} and format == "w4a8":
        return _int4_as_w4a8(weights)
    return None


def _with_one_global_scale(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight] | None:
    scales = [q.global_scale for q in weights if q.global_scale is not None]
    if not scales:
        return list(weights)
    largest = torch.stack(scales).amax()
    if not (largest > 0 and torch.isfinite(largest.reciprocal())):
        return None  # all zeros, or a scale whose reciprocal overflows
    results = [_with_global_scale(q, largest) for q in weights]
    return None if None in results else [q for q in results if q is not None]


def _with_global_scale(q: QuantizedWeight, global_scale: Tensor) -> QuantizedWeight | None:
    """The same numbers with another global scale; None if E4M3 lacks the block scales."""
    assert q.global_scale is not None
    if torch.equal(q.global_scale, global_scale):
        return q
    numbers = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
    wanted = numbers * q.global_scale.double()
    moved = (wanted / global_scale.double()).float().to(torch.float8_e4m3fn)
    lost = moved.double() * global_scale.double() != wanted
    if _looked_up(lost, q.scale).any():
        return None
    scale = _looked_up(moved.view(torch.uint8), q.scale).view(torch.float8_e4m3fn)
    return replace(q, scale=scale, global_scale=global_scale)


def _int4_as_w4a8(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight] | None:
    results = []
    for q in weights:
        scale = q.scale.bfloat16()
        if q.scale.shape[1] * W4A8_GROUP != q.shape[1] or not torch.equal(scale.float(), q.scale):
            return None
        results.append(replace(q, format="w4a8", scale=scale))
    return results


def _mxfp4_as_nvfp4(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight] | None:
    if any((q.scale.view(torch.uint8) == _E8M0_NAN).any() for q in weights):
        return None
    used = [_is_used(q) for q in weights]
    bounds = [_extremes(q, u) for q, u in zip(weights, used, strict=True) if u.any()]
    lowest, highest = _E4M3_EXPONENTS
    shared = 0
    if bounds:
        shared = max(max(high for _, high in bounds) - highest, _LEAST_GLOBAL_EXPONENT)
        if min(low for low, _ in bounds) - shared < lowest:
            return None
    return [_as_nvfp4(q, u, shared) for q, u in zip(weights, used, strict=True)]


def _is_used(q: QuantizedWeight) -> Tensor:
    """Which groups [N, K / 32] have a nonzero number."""
    codes = q.qdata.contiguous()
    if codes.storage_offset() % _WORD.itemsize:
        codes = codes.clone()
    magnitudes = codes.view(_WORD) & _MAGNITUDES  # one word has 16 codes, half a group
    return (magnitudes[:, 0::2] | magnitudes[:, 1::2]) != 0


def _extremes(q: QuantizedWeight, used: Tensor) -> tuple[int, int]:
    """The smallest and the largest exponent of the used groups; at least one is used."""
    byte = q.scale.view(torch.uint8)
    low, high = torch.where(used, byte, _E8M0_NAN).amin(), torch.where(used, byte, 0).amax()
    return int(low) - E8M0_BIAS, int(high) - E8M0_BIAS


def _as_nvfp4(q: QuantizedWeight, used: Tensor, shared: int) -> QuantizedWeight:
    # Used groups have only exponents that E4M3 has; the others may be clamped.
    exponent = (torch.arange(256, dtype=torch.int32) - E8M0_BIAS - shared).clamp(*_E4M3_EXPONENTS)
    table = power_of_two(exponent).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.where(used, _looked_up(table, q.scale), _E4M3_ONE)
    return replace(
        q,
        format="nvfp4",
        scale=scale.repeat_interleave(_MXFP4_GROUP // _NVFP4_GROUP, -1).view(torch.float8_e4m3fn),
        global_scale=torch.tensor(2.0**shared, dtype=torch.float32),
    )


def _looked_up(table: Tensor, scale: Tensor) -> Tensor:
    """`table` [256] indexed by the bytes of `scale`."""
    byte = scale.contiguous().view(torch.uint8)
    return table.index_select(0, byte.flatten().int()).reshape(byte.shape)
