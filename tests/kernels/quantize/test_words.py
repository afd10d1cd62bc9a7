from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from moequant.formats import elements
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.quantize import words
from moequant.kernels.quantize.words import EXACT

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@triton.jit
def divide(x, y, divisor, out, COUNT: tl.constexpr, FUSED: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    d = tl.load(divisor + at)
    one, other = tl.load(x + at)[:, None], tl.load(y + at)[:, None]
    one, other = words.quotients(one, other, d, False, FUSED)
    tl.store(out + 2 * at[:, None], one)
    tl.store(out + 2 * at[:, None] + 1, other)


@triton.jit
def encode(x, code, value, COUNT: tl.constexpr, E4M3: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    m = tl.load(x + at)
    if E4M3:
        found = words.encode_e4m3(m)
        tl.store(value + at, words.decode_e4m3(found))
    else:
        found = words.encode_e2m1(m)
        tl.store(value + at, words.round_e2m1(m))
    tl.store(code + at, found.to(tl.uint8))


@triton.jit
def add(even, odd, total, GROUPS: tl.constexpr, LEVELS: tl.constexpr):
    at = tl.arange(0, GROUPS)[:, None] * 2**LEVELS + tl.arange(0, 2**LEVELS)[None, :]
    summed = words.group_sum(tl.load(even + at), tl.load(odd + at), GROUPS, LEVELS)
    tl.store(total + tl.arange(0, GROUPS), summed)


@triton.jit
def unpack(word, even, odd, COUNT: tl.constexpr, SOURCE: tl.constexpr):
    at = tl.arange(0, COUNT)
    e, o = words.split_words(tl.load(word + at), SOURCE)
    tl.store(even + at, e)
    tl.store(odd + at, o)


def floats(count, seed, low=1.0, high=2.0):
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.rand(count, generator=g, device=DEVICE) * (high - low) + low


def test_quotients_are_rounded_as_ieee_754_says():
    count, programs = 1024, 4 if INTERPRETED else 4096
    total = count * programs
    d = floats(total, 0)
    # At random, and as near to halfway between two floats as a quotient comes.
    quotient = floats(total, 1).double() + 2.0**-24
    x, y = floats(total, 2, 0.0, 4000.0), (quotient * d.double()).float()
    out = torch.empty(2 * total, device=DEVICE)
    divide[(programs,)](x, y, d, out, COUNT=count, FUSED=not INTERPRETED, **EXACT)
    assert torch.equal(out[0::2], x / d)
    assert torch.equal(out[1::2], y / d)


def around(values):
    """Values, what lies halfway between them, and a float to either side of each."""
    values = torch.tensor(values, dtype=torch.float32)
    x = torch.cat([values, (values[1:] + values[:-1]) / 2])
    inf = torch.tensor(torch.inf)
    return torch.cat([x, x.nextafter(inf), x.nextafter(-inf).clamp(min=0)]).to(DEVICE)


def test_e2m1_codes_and_numbers_are_those_of_the_format():
    x = torch.cat([around([0, 0.5, 1, 1.5, 2, 3, 4, 6]), around([6, 7, 8, 1e30, 2.0**-149])])
    code = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    value = torch.empty(len(x), device=DEVICE)
    encode[(len(x),)](x, code, value, COUNT=1, E4M3=False, **EXACT)
    want = elements.encode_e2m1(x)
    # The bits above the low four are not the code's.
    assert torch.equal(code & 15, want)
    assert torch.equal(value, elements.decode_e2m1(want))


def test_e4m3_codes_and_numbers_are_those_of_the_format():
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    x = torch.cat([around(every), around([448, 464, 480, 1e30, 2.0**-149])])
    code = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    value = torch.empty(len(x), device=DEVICE)
    encode[(len(x),)](x, code, value, COUNT=1, E4M3=True, **EXACT)
    want = elements.encode_e4m3(x)
    assert torch.equal(code, want.view(torch.uint8))
    assert torch.equal(value, want.float())


@pytest.mark.parametrize("levels", [3, 4, 6])
def test_groups_are_added_in_the_order_of_the_format(levels):
    from moequant.formats.blocks import group_sum

    # Of sizes so unlike that every order gives another sum.
    x = floats(16 * 2 ** (levels + 1), levels).reshape(16, -1) * 2.0 ** torch.arange(16)[
        :, None
    ].to(DEVICE)
    x *= 2.0 ** torch.randint(-8, 8, x.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    total = torch.empty(16, device=DEVICE)
    even, odd = x[:, 0::2].contiguous(), x[:, 1::2].contiguous()
    add[(1,)](even, odd, total, GROUPS=16, LEVELS=levels, **EXACT)
    assert torch.equal(total, group_sum(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_words_come_apart_into_even_and_odd_columns(dtype):
    w = floats(256, 0, -2.0, 2.0).to(dtype)
    w[:4] = torch.tensor([-0.0, 0.0, 2.0**-24, -(2.0**-24)])
    even, odd = (torch.empty(128, device=DEVICE) for _ in range(2))
    unpack[(1,)](words.as_words(w), even, odd, COUNT=128, SOURCE=words.source_of(w))
    for found, wanted in ((even, w[0::2]), (odd, w[1::2])):
        assert torch.equal(found.view(torch.int32), wanted.float().view(torch.int32))
