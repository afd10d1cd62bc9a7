"""Quantization of activations for the GEMMs.

| scheme | elements | one FP32 scale per |
|---|---|---|
| fp8_group128 | E4M3 | token and 128 columns, the last group may be incomplete |
| fp8_token | E4M3 | token |
| fp8_static | E4M3 | token, all the same: given with the weights, not computed |
| none | as given | - |

The scale is amax / 448, and 1 where amax is 0; codes round to nearest even after clamping to +-448.
A group with NaN or Inf becomes NaN, which affects only the result of its own token. With
fp8_static, values beyond 448 scales saturate, including Inf.

Kernels differ only for tiny amax: DeepGEMM's recipe raises amax to 1e-4, vLLM's to 1e-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.formats.blocks import block_amax, expand_blocks
from moequant.formats.elements import E4M3_MAX, divide, encode_e4m3

if TYPE_CHECKING:
    from torch import Tensor

SCHEMES = ("fp8_group128", "fp8_token", "fp8_static", "none")
QUANTIZED_DTYPE = torch.float8_e4m3fn
_FP32_SMALLEST = 2.0**-149


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activations quantized by a scheme: `x = qdata * scale`.

    Attributes:
        scheme: one of SCHEMES.
        qdata: [M, K] float8_e4m3fn, or the activations themselves for "none".
        scale: [M, groups] float32, or None for "none".
    """

    scheme: str
    qdata: Tensor
    scale: Tensor | None

    def take(self, rows: Tensor) -> Activations:
        """Rows `rows`, int64 [R], in that order; copies."""
        scale = None if self.scale is None else self.scale[rows]
        return Activations(scheme=self.scheme, qdata=self.qdata[rows], scale=scale)

    def dequantize(self) -> Tensor:
        """[M, K] float32."""
        if self.scale is None:
            return self.qdata.float()
        block = _block(self.scheme, self.qdata.shape[1])
        return self.qdata.float() * expand_blocks(self.scale, block, self.qdata.shape)


def quantize_activations(
    x: Tensor, scheme: str, *, static_scale: Tensor | None = None
) -> Activations:
    """Quantize [M, K] bfloat16, float16 or float32 by `scheme`.

    Args:
        x: the activations.
        scheme: one of SCHEMES.
        static_scale: for "fp8_static", the scale, [1] float32.

    Raises:
        UnsupportedError: no scheme is called that, or "fp8_static" without a scale.
    """
    if scheme not in SCHEMES:
        raise UnsupportedError(
            f"unknown activation scheme {scheme!r}; use one of: {', '.join(SCHEMES)}"
        )
    if scheme == "none":
        return Activations(scheme=scheme, qdata=x, scale=None)
    x = x.float()
    if scheme == "fp8_static":
        if static_scale is None:
            raise UnsupportedError(
                "fp8_static needs static_scale; give it, or use fp8_token, which computes a scale "
                "for every token"
            )
        scale = static_scale.expand(x.shape[0], 1).contiguous()
        return Activations(scheme=scheme, qdata=encode_e4m3(x / scale), scale=scale)
    block = _block(scheme, x.shape[1])
    amax = block_amax(x, block)
    # amax / 448 of the smallest denormals underflows to 0; 2**-149 keeps the division finite.
    scale = torch.where(amax == 0, 1.0, divide(amax, E4M3_MAX).clamp(min=_FP32_SMALLEST))
    qdata = encode_e4m3(x / expand_blocks(scale, block, x.shape))
    return Activations(scheme=scheme, qdata=qdata, scale=scale)


def scale_columns(scheme: str, K: int) -> int | None:
    """Columns of `Activations.scale` for K columns of activations; None where it has no scale."""
    if scheme == "none":
        return None
    return -(-K // _block(scheme, K)[1])


def _block(scheme: str, K: int) -> tuple[int, int]:
    return (1, 128) if scheme == "fp8_group128" else (1, K)
