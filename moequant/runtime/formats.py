"""Formats that experts run in: those of `moequant.formats`, and five that nothing is converted to.

| name | codes | scale | activations |
|---|---|---|---|
| bf16, fp16, fp32 | bfloat16, float16, float32 | 1, [..., 1, 1] float32 | none |
| fp8_channel | E4M3 | amax / 448 of each row, [..., N, 1] float32 | fp8_token |
| fp8_tensor | E4M3 | amax / 448 of each matrix, [..., 1, 1] float32 | fp8_token |

They are for experts that were not converted, and for checkpoints that others made. No recipe,
dialect or layout knows them. fp8_tensor can be fed one scale for all tokens instead, fp8_static,
which comes with the weights: see `ExpertWeights.gate_up_input_scale`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.formats import REGISTRY
from moequant.formats.base import Format, QuantizedWeight, check_tensors
from moequant.formats.elements import E4M3_MAX, FLOAT32_TINY, divide, encode_e4m3

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_ALL = 1 << 30
"""Rows or columns of a block that is never full."""


class _Scaled(Format):
    """One multiplier for each matrix, or each of its rows."""

    ragged = True
    codes_per_byte = 1
    scale_dtype = torch.float32

    def dequantize(self, q: QuantizedWeight) -> Tensor:
        """[..., N, K] float32: code times scale."""
        return q.qdata.float() * q.scale


class _Unquantized(_Scaled):
    """Weights as they were: float32 is rounded to the dtype, and the scale is 1."""

    block = (_ALL, _ALL)
    activations = "none"

    def _quantize(
        self, w: Tensor, options: Mapping[str, str], global_scale: Tensor | None
    ) -> QuantizedWeight:
        qdata = w.to(self.qdata_dtype)
        if not qdata.isfinite().all():
            raise UnsupportedError(
                f"a weight of {w.abs().max().item():g} is beyond {self.qdata_dtype}, which ends at "
                f"{torch.finfo(self.qdata_dtype).max:g}; use bf16 or fp32"
            )
        scale = w.new_ones(*w.shape[:-2], 1, 1)
        return QuantizedWeight(
            format=self.name, qdata=qdata, scale=scale, global_scale=None, shape=w.shape
        )


class Bf16(_Unquantized):
    """bfloat16."""

    name = "bf16"
    summary = "BF16, not quantized"
    qdata_dtype = torch.bfloat16


class Fp16(_Unquantized):
    """float16; a weight beyond 65504 is an error."""

    name = "fp16"
    summary = "FP16, not quantized"
    qdata_dtype = torch.float16


class Fp32(_Unquantized):
    """float32."""

    name = "fp32"
    summary = "FP32, not quantized"
    qdata_dtype = torch.float32


class _Fp8(_Scaled):
    """E4M3, scale amax / 448, and 1 where all is zero; codes round to nearest even."""

    qdata_dtype = torch.float8_e4m3fn
    activations = "fp8_token"

    def _quantize(
        self, w: Tensor, options: Mapping[str, str], global_scale: Tensor | None
    ) -> QuantizedWeight:
        axes = (-1,) if self.block[0] == 1 else (-2, -1)
        amax = w.abs().amax(axes, keepdim=True)
        scale = torch.where(amax == 0, 1.0, divide(amax, E4M3_MAX).clamp(min=FLOAT32_TINY))
        return QuantizedWeight(
            format=self.name,
            qdata=encode_e4m3(w / scale),
            scale=scale,
            global_scale=None,
            shape=w.shape,
        )


class Fp8Channel(_Fp8):
    """One scale a row, as compressed-tensors' FP8_DYNAMIC has it."""

    name = "fp8_channel"
    summary = "FP8 E4M3, one FP32 scale per row, FP8 activations per token"
    block = (1, _ALL)


class Fp8Tensor(_Fp8):
    """One scale a matrix."""

    name = "fp8_tensor"
    summary = "FP8 E4M3, one FP32 scale per matrix, FP8 activations per token"
    block = (_ALL, _ALL)


RUNTIME_ONLY: dict[str, Format] = {
    f.name: f for f in (Bf16(), Fp16(), Fp32(), Fp8Channel(), Fp8Tensor())
}


def get_format(name: str) -> Format:
    """The format called `name`, of `moequant.formats` or of this module.

    Raises:
        UnsupportedError: there is none; lists those there are.
    """
    formats = {**REGISTRY, **RUNTIME_ONLY}
    if name not in formats:
        raise UnsupportedError(f"no format is called {name!r}; there are: {', '.join(formats)}")
    return formats[name]


def dequantize(q: QuantizedWeight) -> Tensor:
    """As `moequant.formats.dequantize`, for the formats of this module too."""
    return get_format(q.format).dequantize(q)


def check_parts(
    tensors: Mapping[str, Tensor], format: str, shape: Sequence[int], name: str
) -> None:
    """As `moequant.formats.check_parts`, for the formats of this module too.

    Raises:
        CheckpointError: a part is missing, one too many, or of the wrong dtype or shape.
        UnsupportedError: no format is called that, or it cannot hold `shape`.
    """
    check_tensors(tensors, get_format(format).specs(shape, name), name)
