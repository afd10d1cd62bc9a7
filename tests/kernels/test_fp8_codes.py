from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from moequant.formats.elements import encode_e4m3
from moequant.kernels.fp8_codes import encode_e4m3 as encode_in_kernel
from moequant.kernels.launch import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@triton.jit
def encode(x, codes, COUNT: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(codes + at, encode_in_kernel(tl.load(x + at), NATIVE))


def values():
    """Every code's value, halfway to its neighbour, and one float beside either."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[codes.isfinite()].sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([exact, middle])
    inf = torch.tensor(torch.inf)
    return torch.cat([x, x.nextafter(inf), x.nextafter(-inf), torch.tensor([1e-30, -1e-30])])


@pytest.mark.parametrize("native", [False] if INTERPRETED else [False, True])
def test_codes_are_those_of_the_format_to_the_last_bit(native):
    x = values().clamp(-448, 448)
    x = torch.cat([x, x.new_zeros(2048 - len(x))]).to(DEVICE)
    codes = torch.empty(2048, dtype=torch.float8_e4m3fn, device=DEVICE)
    encode[(1,)](x, codes, COUNT=2048, NATIVE=native)
    assert torch.equal(codes.view(torch.uint8), encode_e4m3(x).view(torch.uint8))
