from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moequant.formats.elements import decode_e2m1, decode_e8m0, decode_int4
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.portable import codes

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@triton.jit
def decode_all(out, e4m3, e2m1, int4, e8m0, NATIVE: tl.constexpr):
    code = tl.arange(0, 256).to(tl.uint8)
    at = tl.arange(0, 256)
    tl.store(out + at, codes.decode_e4m3(code, False))
    tl.store(e4m3 + at, codes.decode_e4m3(code, NATIVE))
    tl.store(e2m1 + at, codes.decode_e2m1(code & 15))
    tl.store(int4 + at, codes.decode_int4(code & 15))
    tl.store(e8m0 + at, codes.decode_e8m0(code))


def bits_of(x):
    """What tells -0 from 0."""
    return x.contiguous().view(torch.int32)


def test_every_code_has_the_value_of_its_format():
    made = [torch.empty(256, device=DEVICE) for _ in range(5)]
    decode_all[(1,)](*made, NATIVE=not INTERPRETED)
    bits, e4m3, e2m1, int4, e8m0 = (t.cpu() for t in made)
    code = torch.arange(256).to(torch.uint8)
    want = code.view(torch.float8_e4m3fn).float()
    for got in (bits, e4m3):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(bits_of(got[~want.isnan()]), bits_of(want[~want.isnan()]))
    assert torch.equal(bits_of(e2m1), bits_of(decode_e2m1(code & 15)))
    assert torch.equal(int4, decode_int4(code & 15))
    scale = decode_e8m0(code.view(torch.float8_e8m0fnu))
    assert torch.equal(e8m0[:255], scale[:255])
    assert bool(e8m0[255].isnan())


@triton.jit
def decode_pairs(scale, e2m1, int4):
    byte = tl.arange(0, 256).to(tl.uint8)
    at = tl.arange(0, 256)[:, None] * 2 + tl.arange(0, 2)[None, :]
    factor = tl.load(scale + tl.program_id(0)) + tl.zeros([256], tl.float32)
    pair = codes.halves(codes.e2m1_pairs(byte, factor)).to(tl.float32)
    tl.store(e2m1 + tl.program_id(0) * 512 + at, pair)
    tl.store(int4 + at, codes.halves(codes.int4_pairs(byte)).to(tl.float32))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device: it is PTX")
def test_every_byte_has_the_values_of_its_two_codes_times_every_scale():
    every = torch.arange(256).to(torch.uint8)
    of_e4m3 = every[:127].view(torch.float8_e4m3fn).float()
    of_e8m0 = every[:254].view(torch.float8_e8m0fnu).float()  # 6 * 2**127 is Inf
    scale = torch.cat([of_e4m3, of_e8m0])
    e2m1, int4 = torch.empty(len(scale), 256, 2), torch.empty(256, 2)
    e2m1, int4 = e2m1.to(DEVICE), int4.to(DEVICE)
    decode_pairs[(len(scale),)](scale.to(DEVICE), e2m1, int4)
    code = torch.stack([every & 15, every >> 4], 1)
    want = decode_e2m1(code) * scale[:, None, None]
    assert torch.equal(bits_of(e2m1.cpu()), bits_of(want))
    assert torch.equal(int4.cpu(), decode_int4(code))


@triton.jit
def multiply(a, x, out, A_SPLIT: tl.constexpr, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    zero = tl.zeros([16, 16], tl.float32)
    product = codes.dot_exact(tl.load(a + at), tl.load(x + at), zero, A_SPLIT, SPLIT, INTERPRETED)
    tl.store(out + at, product)


SPLITS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


@pytest.mark.parametrize("x_dtype", SPLITS)
@pytest.mark.parametrize("a_dtype", SPLITS)
def test_products_of_float16_and_float32_are_exact(a_dtype, x_dtype):
    g = torch.Generator().manual_seed(0)
    # A power of two in every row: a sum of one product, which is the other factor to the last bit.
    for turned in (False, True):
        powers = torch.zeros(16, 16)
        powers[torch.arange(16), torch.randperm(16, generator=g)] = 4.0
        other = torch.randn(16, 16, generator=g)
        a, x = (other, powers) if turned else (powers, other)
        a, x = a.to(a_dtype), x.to(x_dtype)
        out = torch.empty(16, 16, device=DEVICE)
        multiply[(1,)](
            a.to(DEVICE), x.to(DEVICE), out, A_SPLIT=SPLITS[a_dtype], SPLIT=SPLITS[x_dtype],
            INTERPRETED=INTERPRETED,
        )  # fmt: skip
        assert torch.equal(out.cpu(), a.float() @ x.float())
