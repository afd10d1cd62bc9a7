"""E2M1 codes that the LLVM kernel finds by comparing with thresholds equal those of the formats.

Checked for every BF16 weight and every scale.
"""

from __future__ import annotations

import pytest
import torch

from moequant.formats.elements import E2M1_FLOAT32_MAX, encode_e2m1, pack_nibbles
from moequant.native_code import jit
from moequant.native_code.vectors import I32
from moequant.quantizers.e2m1 import BLOCK, encode_bfloat16
from moequant.quantizers.operands import Operand, new_kernel, operand_of

E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# Block scale times global scale: what a code of value 1 represents.
SCALES = {
    "mxfp4": torch.exp2(torch.arange(-127, 126)),
    "nvfp4": E4M3,
    "nvfp4, least global scale": E4M3 * 2.0**-126,
    "nvfp4, largest global scale": E4M3[E4M3 <= 272] * 2.0**117,
}


def compiled(group):
    """BF16 weights to codes, with one scale for all groups, passed as the global scale."""
    f = new_kernel()
    scale = f.parameter("global_scale").splat(16)
    blocks = f.parameter("rows") // (BLOCK // group)
    encode_bfloat16(f, blocks, group=group, scales=lambda bits: (bits, scale))
    f.give(f.constant(I32, 0))
    return jit.compile_function(f)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_every_bf16_pattern_under_every_scale_has_the_code_of_the_rounded_quotient(group, scales):
    kernel = compiled(group)
    # Permuted, so that the weights of a group differ widely in magnitude.
    bits = torch.arange(1 << 16, dtype=torch.int32) * 40503 % (1 << 16)
    w = bits.to(torch.int16).view(torch.bfloat16)
    w = torch.where(w.isfinite(), w, 0)
    clamped = w.float().clamp(-E2M1_FLOAT32_MAX, E2M1_FLOAT32_MAX)
    qdata = torch.empty(len(w) // 2, dtype=torch.uint8)
    scale_bytes = torch.empty(len(w) // group, dtype=torch.uint8)
    for scale in scales:
        result = Operand(data=qdata, scale=scale_bytes, global_scale=scale.item())
        kernel(*operand_of(w).arguments(), len(scale_bytes), 1, *result.arguments(), 0, 0)
        assert torch.equal(qdata, pack_nibbles(encode_e2m1(clamped / scale))), scale
