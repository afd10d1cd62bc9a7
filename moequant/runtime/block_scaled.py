"""Quantization of activations to NVFP4, MXFP4 and MXFP8: groups of columns with a scale of a byte.

A group with NaN or Inf has the scale NaN and codes of 0, so it decodes to NaN. Hardware has no
other place for it: E2M1 has no NaN.

| | NVFP4 | MXFP4 | MXFP8 |
|---|---|---|---|
| columns of a group | 16 | 32 | 32 |
| codes | E2M1 | E2M1 | E4M3 |
| scale | E4M3 of amax / 6 / global scale | E8M0, rule "even" | E8M0, rule "ceil" |
| scale of a zero group | 0 | 2**-127 | 2**-127 |

The rules of E8M0 are those of `moequant.formats.e8m0`. All rounding is to nearest, ties to even.
Codes saturate, but NVFP4's scale too: what lies beyond 2688 global scales becomes that.

These are vLLM's rules, in float32 with correctly rounded quotients, which differ from its kernels
where those take an approximate reciprocal (NVFP4), flush denormals (amax below 2**-117) or make
large numbers of NaN. Sources: vLLM main of Aug 2026, `quantization/fp4/nvfp4_utils.cuh`
(`cvt_warp_fp16_to_fp4`, NVFP4 and MXFP4), `tests/kernels/quantization/nvfp4_utils.py`
(`ref_nvfp4_quant`), `quantization/utils/mxfp8_utils.py`; FlashInfer main of Aug 2026,
`cvt_warp_fp16_to_mxfp8`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moequant.formats.blocks import group_amax, grouped
from moequant.formats.e8m0 import scale_exponent
from moequant.formats.elements import (
    E2M1,
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    Element,
    divide,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    power_of_two,
)
from moequant.formats.static_scales import LARGEST_STATIC_SCALE, LEAST_STATIC_SCALE

NVFP4_GROUP, E8M0_GROUP = 16, 32
LEAST_GLOBAL_SCALE, LARGEST_GLOBAL_SCALE = LEAST_STATIC_SCALE, LARGEST_STATIC_SCALE
"""NVFP4's global scales lie between these, so that its products with scales from 2**-9 to 448 and
their reciprocals are normal float32."""
_E8M0_NAN = 255
_SIXTH = 0.16666667163372040
"""1 / 6 in float32, by which vLLM multiplies."""


def nvfp4_token_scale(x: Tensor) -> Tensor:
    """The global scale of each token of float32 [M, K], [M, 1]: amax / 2688, NaN for NaN or Inf."""
    if not x.shape[1]:
        return x.new_full((x.shape[0], 1), LEAST_GLOBAL_SCALE)
    amax = x.abs().amax(1, keepdim=True)
    scale = divide(amax, E2M1_MAX * E4M3_MAX).clamp(min=LEAST_GLOBAL_SCALE)
    return scale.masked_fill(~amax.isfinite(), torch.nan)


def quantize_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups of 16 columns: `x = code * scale * global_scale`.

    Args:
        x: float32 [M, K], K a multiple of 16.
        global_scale: float32 [M, 1] or [1, 1], from LEAST_GLOBAL_SCALE to LARGEST_GLOBAL_SCALE, or
            NaN.

    Returns:
        Codes [M, K / 2] uint8, two a byte, the even column low; scales [M, K / 16] float8_e4m3fn.
    """
    groups, amax = grouped(x, NVFP4_GROUP), group_amax(x, NVFP4_GROUP)
    wanted = global_scale.reciprocal() * (amax * _SIXTH)
    scale = encode_e4m3(wanted.masked_fill(~amax.isfinite(), torch.nan))
    numbers = scale.float()
    factor = torch.where(numbers == 0, 0.0, (numbers * global_scale).reciprocal())
    codes = encode_e2m1(_scaled(groups, factor)).reshape(x.shape)
    return pack_nibbles(codes), scale


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups of 32 columns: `x = code * scale`.

    Args:
        x: float32 [M, K], K a multiple of 32.

    Returns:
        Codes [M, K / 2] uint8, two a byte, the even column low; scales [M, K / 32] float8_e8m0fnu.
    """
    groups, scale = _with_e8m0(x, E2M1, "even")
    return pack_nibbles(encode_e2m1(groups).reshape(x.shape)), scale


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same with codes [M, K] float8_e4m3fn."""
    groups, scale = _with_e8m0(x, E4M3, "ceil")
    return encode_e4m3(groups).reshape(x.shape), scale


def _with_e8m0(x: Tensor, element: Element, rule: str) -> tuple[Tensor, Tensor]:
    """Groups of 32 in units of their scale, [M, K / 32, 32], and the scales [M, K / 32]."""
    groups, amax = grouped(x, E8M0_GROUP), group_amax(x, E8M0_GROUP)
    finite = amax.isfinite()
    exponent = scale_exponent(amax.masked_fill(~finite, 0.0), element.name, rule)
    factor = power_of_two(-exponent).masked_fill(~finite, torch.nan)
    code = (exponent + 127).masked_fill(~finite, _E8M0_NAN).to(torch.uint8)
    return _scaled(groups, factor), code.view(torch.float8_e8m0fnu)


def _scaled(groups: Tensor, factor: Tensor) -> Tensor:
    """Each group times its factor; 0 where that is NaN."""
    factor = factor[..., None]
    return (groups * factor).masked_fill(factor.isnan(), 0.0)
