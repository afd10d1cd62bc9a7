"""Codes by comparison, for every scale and every BF16, against moequant.formats."""

from __future__ import annotations

import pytest
import torch

from moequant.formats.elements import E2M1_FLOAT32_MAX, encode_e2m1, pack_nibbles
from moequant.quantizers import jit
from moequant.quantizers.e2m1 import BLOCK, encode_bfloat16
from moequant.quantizers.operands import Operand, new_kernel, operand_of
from moequant.quantizers.vectors import I32

E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
UNITS = {
    "mxfp4": torch.exp2(torch.arange(-127, 126)),
    "nvfp4": E4M3,
    "nvfp4, least global scale": E4M3 * 2.0**-126,
    "nvfp4, largest global scale": E4M3[E4M3 <= 272] * 2.0**117,
}


def compiled(group):
    """BF16 weights to codes, given the unit of all groups as the global scale."""
    f = new_kernel()
    unit = f.parameter("global_scale").splat(16)
    blocks = f.parameter("rows") // (BLOCK // group)
    encode_bfloat16(f, blocks, group=group, scales=lambda bits: (bits, unit))
    f.give(f.constant(I32, 0))
    return jit.compile_kernel(f.text())


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
def test_every_bf16_pattern_under_every_unit_has_the_code_of_the_rounded_quotient(group, units):
    kernel = compiled(group)
    # Mixed by an odd factor, so that neighbours in memory are nowhere near each other.
    bits = torch.arange(1 << 16, dtype=torch.int32) * 40503 % (1 << 16)
    w = bits.to(torch.int16).view(torch.bfloat16)
    w = torch.where(w.isfinite(), w, 0)
    clamped = w.float().clamp(-E2M1_FLOAT32_MAX, E2M1_FLOAT32_MAX)
    qdata = torch.empty(len(w) // 2, dtype=torch.uint8)
    scale = torch.empty(len(w) // group, dtype=torch.uint8)
    for unit in units:
        result = Operand(data=qdata, scale=scale, global_scale=unit.item())
        kernel(*operand_of(w).arguments(), len(scale), 1, *result.arguments(), 0)
        assert torch.equal(qdata, pack_nibbles(encode_e2m1(clamped / unit))), unit
