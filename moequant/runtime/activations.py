"""Quantization of activations for the GEMMs.

| scheme | elements | one scale per |
|---|---|---|
| fp8_group128 | E4M3 | token and 128 columns, FP32; the last group may be incomplete |
| fp8_token | E4M3 | token, FP32 |
| fp8_tensor | E4M3 | token, FP32, all the same: of the largest magnitude of all tokens |
| fp8_static | E4M3 | token, FP32, all the same: given with the weights, not computed |
| nvfp4 | E2M1 | token and 16 columns, E4M3; and token, FP32 |
| nvfp4_static | E2M1 | token and 16 columns, E4M3; and expert, FP32: given with the weights |
| mxfp4 | E2M1 | token and 32 columns, E8M0 |
| mxfp8 | E4M3 | token and 32 columns, E8M0 |
| none | as given | - |

An FP8 scheme's scale is amax / 448, and 1 where amax is 0; codes round to nearest even after
clamping to +-448. A group with NaN or Inf becomes NaN, which affects only the result of its own
token. With fp8_static, values beyond 448 scales saturate, including Inf.

With fp8_tensor all rows that are quantized at once are one group, so a token's result depends on
the others, and NaN or Inf in one makes all results NaN. Before the first GEMM these are all tokens,
with experts here or without; before the second, the rows that the first has computed.

Kernels differ only for tiny amax: DeepGEMM's recipe raises amax to 1e-4, vLLM's to 1e-10.

`moequant.runtime.block_scaled` has the rules of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

import torch

from moequant.errors import UnsupportedError, unknown_name
from moequant.formats.blocks import block_amax, expand_blocks
from moequant.formats.elements import (
    E4M3_MAX,
    decode_e2m1,
    divide,
    encode_e4m3,
    unpack_nibbles,
)
from moequant.runtime.block_scaled import (
    E8M0_GROUP,
    NVFP4_GROUP,
    nvfp4_token_scale,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)

if TYPE_CHECKING:
    from torch import Tensor

ActivationsChoice = Literal["format", "none", "fp8_token", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8"]
"""What callers ask for; "format" stands for a scheme that weights say, "nvfp4" for one of two."""


FP8_TENSOR: Final = "fp8_tensor"
FP8_SCHEMES = ("fp8_group128", "fp8_token", FP8_TENSOR, "fp8_static")
NVFP4: Final = "nvfp4"
NVFP4_STATIC: Final = "nvfp4_static"
MXFP4: Final = "mxfp4"
MXFP8: Final = "mxfp8"
GROUPS = {
    NVFP4: NVFP4_GROUP,
    NVFP4_STATIC: NVFP4_GROUP,
    MXFP4: E8M0_GROUP,
    MXFP8: E8M0_GROUP,
}
"""Columns of a group, of the schemes whose scales are a byte."""
FP4_SCHEMES = (NVFP4, NVFP4_STATIC, MXFP4)
SCHEMES = (*FP8_SCHEMES, *GROUPS, "none")
QUANTIZED_DTYPE = torch.float8_e4m3fn
_FP32_SMALLEST = 2.0**-149


def choice_of(scheme: str) -> str:
    """What a caller asks for to get a scheme: itself, or what stands for it with such weights."""
    return scheme if scheme in get_args(ActivationsChoice) else "format"


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Activations quantized by a scheme: `x = qdata * scale`, times `global_scale` if any.

    Attributes:
        scheme: one of SCHEMES.
        qdata: [M, K] float8_e4m3fn; [M, K / 2] uint8 for E2M1, two codes a byte, the even column
            low; or the activations themselves for "none".
        scale: [M, groups] float32, float8_e4m3fn or float8_e8m0fnu; None for "none".
        global_scale: [M, 1] float32 of NVFP4, which multiplies too; else None.
    """

    scheme: str
    qdata: Tensor
    scale: Tensor | None
    global_scale: Tensor | None = None

    def take(self, rows: Tensor) -> Activations:
        """Rows `rows`, int64 [R], in that order; copies."""
        scale, global_scale = self.scale, self.global_scale
        return Activations(
            scheme=self.scheme,
            qdata=_take(self.qdata, rows),
            scale=None if scale is None else _take(scale, rows),
            global_scale=None if global_scale is None else _take(global_scale, rows),
        )

    def dequantize(self) -> Tensor:
        """[M, K] float32; exact but for the products with a scale that is no power of two."""
        if self.scale is None:
            return self.qdata.float()
        if self.qdata.dtype == torch.uint8:
            numbers = decode_e2m1(unpack_nibbles(self.qdata))
        else:
            numbers = self.qdata.float()
        block = _block(self.scheme, numbers.shape[1])
        x = numbers * expand_blocks(self.scale.float(), block, numbers.shape)
        return x if self.global_scale is None else x * self.global_scale


def _take(part: Tensor, rows: Tensor) -> Tensor:
    # Through bytes: torch does not index every float8 dtype.
    numbers = part.view(torch.uint8) if part.itemsize == 1 else part
    return numbers[rows].view(part.dtype)


def quantize_activations(
    x: Tensor, scheme: str, *, static_scale: Tensor | None = None
) -> Activations:
    """Quantize [M, K] bfloat16, float16 or float32 by `scheme`.

    Args:
        x: the activations.
        scheme: one of SCHEMES.
        static_scale: for "fp8_static", the scale, and for "nvfp4_static", the global scale: [1]
            float32.

    Raises:
        UnsupportedError: no scheme is called that, a static one without its scale, or a K that is
            not a multiple of the scheme's groups.
    """
    if scheme not in SCHEMES:
        raise UnsupportedError(unknown_name("activation scheme", scheme, SCHEMES))
    if scheme in _DYNAMIC_OF and static_scale is None:
        raise UnsupportedError(
            f"{scheme} needs static_scale; give it, or use {_DYNAMIC_OF[scheme]}, which computes a "
            "scale for every token"
        )
    if scheme == "none":
        return Activations(scheme=scheme, qdata=x, scale=None)
    x = x.float()
    if scheme in GROUPS:
        return _quantize_groups(x, scheme, static_scale)
    if scheme == "fp8_static":
        assert static_scale is not None
        scale = static_scale.expand(x.shape[0], 1).contiguous()
        return Activations(scheme=scheme, qdata=encode_e4m3(x / scale), scale=scale)
    block = _block(scheme, x.shape[1])
    amax = block_amax(x, block)
    if scheme == FP8_TENSOR and amax.numel():
        amax = amax.amax().expand(amax.shape)
    # amax / 448 of the smallest denormals underflows to 0; 2**-149 keeps the division finite.
    scale = torch.where(amax == 0, 1.0, divide(amax, E4M3_MAX).clamp(min=_FP32_SMALLEST))
    qdata = encode_e4m3(x / expand_blocks(scale, block, x.shape))
    return Activations(scheme=scheme, qdata=qdata, scale=scale)


_DYNAMIC_OF = {"fp8_static": "fp8_token", NVFP4_STATIC: NVFP4}
"""The scheme that computes what a static one is given."""


def _quantize_groups(x: Tensor, scheme: str, static_scale: Tensor | None) -> Activations:
    """The schemes in GROUPS."""
    if x.shape[1] % GROUPS[scheme]:
        raise UnsupportedError(
            f"{x.shape[1]} columns are not a multiple of {GROUPS[scheme]}, which {scheme} needs; "
            "quantize these activations by another scheme"
        )
    global_scale = None
    if scheme == MXFP4:
        qdata, scale = quantize_mxfp4(x)
    elif scheme == MXFP8:
        qdata, scale = quantize_mxfp8(x)
    else:
        global_scale = nvfp4_token_scale(x)
        if scheme == NVFP4_STATIC:
            assert static_scale is not None
            global_scale = static_scale.expand(x.shape[0], 1).contiguous()
        qdata, scale = quantize_nvfp4(x, global_scale)
    return Activations(scheme=scheme, qdata=qdata, scale=scale, global_scale=global_scale)


def scale_columns(scheme: str, K: int) -> int | None:
    """Columns of `Activations.scale` for K columns of activations; None where it has no scale."""
    if scheme == "none":
        return None
    return -(-K // _block(scheme, K)[1])


def _block(scheme: str, K: int) -> tuple[int, int]:
    if scheme in GROUPS:
        return 1, GROUPS[scheme]
    return (1, 128) if scheme == "fp8_group128" else (1, K)
