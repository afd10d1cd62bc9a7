"""Weights that are not quantized: BF16, FP16 and FP32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.errors import UnsupportedError
from moequant.formats.base import WHOLE, Format, QuantizedWeight
from moequant.formats.elements import BF16, FP16, FP32

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Plain(Format):
    """Weights rounded to a dtype, to nearest even; the scale is 1."""

    block = (WHOLE, WHOLE)
    ragged = True
    scale_dtype = torch.float32
    activations = "none"

    def _quantize(
        self,
        w: Tensor,
        options: Mapping[str, str],
        global_scale: Tensor | None,
        importance: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        qdata = self.element.encode(w)
        if not qdata.isfinite().all():
            raise UnsupportedError(
                f"a weight of {w.abs().max().item():g} exceeds the largest {self.qdata_dtype}, "
                f"{self.element.largest:g}; use bf16 or fp32"
            )
        return qdata, _unit_scale(w)


class Bf16(_Plain):
    """bfloat16; quantized weights can be dequantized to it."""

    name = "bf16"
    summary = "BF16, not quantized"
    uses = frozenset({"dequantize", "run"})
    element = BF16


class Fp16(_Plain):
    """float16; a weight beyond 65504 is an error."""

    name = "fp16"
    summary = "FP16, not quantized"
    uses = frozenset({"run"})
    element = FP16


class Fp32(_Plain):
    """float32."""

    name = "fp32"
    summary = "FP32, not quantized"
    uses = frozenset({"run"})
    element = FP32


_NAMES = {format.element.dtype: format.name for format in (Bf16, Fp16, Fp32)}


def plain_weight(w: Tensor) -> QuantizedWeight:
    """A bfloat16, float16 or float32 weight [..., N, K] as a QuantizedWeight; no copy."""
    return QuantizedWeight(
        format=_NAMES[w.dtype],
        qdata=w,
        scale=_unit_scale(w),
        shape=w.shape,
    )


def _unit_scale(w: Tensor) -> Tensor:
    return torch.ones(*w.shape[:-2], 1, 1, dtype=torch.float32, device=w.device)
