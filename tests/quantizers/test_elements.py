"""The codecs alone, against those of moequant.formats, on bit patterns of float32."""

from __future__ import annotations

import pytest
import torch

from moequant.formats import elements as reference
from moequant.native_code import jit
from moequant.native_code.vectors import I32, I64
from moequant.quantizers.elements import (
    E2M1,
    E4M3,
    Source,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_int4,
    encode_int4,
    encode_near_int4,
    magnitude,
    round_int4,
    round_to_bfloat16,
    sign_bit,
    widen_bfloat16,
)
from moequant.quantizers.operands import Operand, new_kernel, operand_of

LANES = 16


def compiled(compute):
    """float32 [n], n a multiple of 16, to int32 [n] by `compute` on vectors of 16."""
    f = new_kernel()
    source = Source("float32")
    with f.loop(f.constant(I64, 0), f.parameter("rows"), LANES) as at:
        x = source.float(source.load(f, f.parameter("w"), at, LANES))
        f.store(compute(x).bitcast("i32"), f.parameter("qdata"), at)
    f.give(f.constant(I32, 0))
    kernel = jit.compile_function(f)

    def run(x):
        found = torch.empty(len(x), dtype=torch.int32)
        kernel(*operand_of(x).arguments(), len(x), 1, found.data_ptr(), 0, 0, 0.0, 0, 0)
        return found

    return run


def signed(minifloat, place):
    def encode(x):
        return minifloat.encode(magnitude(x).bitcast("float")) | sign_bit(x, place)

    return encode


CODECS = {
    "e2m1": (signed(E2M1, 3), reference.encode_e2m1),
    "e4m3": (signed(E4M3, 7), lambda x: reference.encode_e4m3(x).view(torch.uint8)),
    "int4": (encode_int4, reference.encode_int4),
    "e2m1 rounded": (
        lambda x: E2M1.round(magnitude(x).bitcast("float")),
        lambda x: reference.decode_e2m1(reference.encode_e2m1(x.abs())).view(torch.int32),
    ),
    # A zero's sign is lost, which no square and no code can tell.
    "int4 rounded": (
        round_int4,
        lambda x: (x.round().clamp(-8, 7) + 0.0).view(torch.int32),
    ),
    "bfloat16": (
        lambda x: widen_bfloat16(round_to_bfloat16(x)),
        lambda x: x.bfloat16().float().view(torch.int32),
    ),
}
every_codec = pytest.mark.parametrize(("ours", "theirs"), CODECS.values(), ids=CODECS)


def agree(ours, theirs, bits):
    x = bits.view(torch.float32)
    x = torch.where(x.isfinite(), x, 0)
    assert torch.equal(compiled(ours)(x), theirs(x).to(torch.int32))


@every_codec
def test_codecs_agree_around_every_20_bit_pattern(ours, theirs):
    # Numbers of 8 significant bits, as codes, halves between them and BF16 are, end in zeros; the
    # neighbours on both sides, and some in between, come with them.
    heads = torch.arange(-(1 << 19), 1 << 19, dtype=torch.int32) << 12
    for tail in (0, 1, 0x7FF, 0x800, 0x801, 0xFFF):
        agree(ours, theirs, heads + tail)


@pytest.mark.full
@every_codec
def test_codecs_agree_on_every_float32(ours, theirs):
    run = compiled(ours)
    for start in range(-(1 << 31), 1 << 31, 1 << 23):
        x = torch.arange(start, start + (1 << 23), dtype=torch.int64).to(torch.int32)
        x = x.view(torch.float32)
        x = torch.where(x.isfinite(), x, 0)
        assert torch.equal(run(x), theirs(x).to(torch.int32))


@pytest.mark.parametrize("unit", [2.0**-28, 1.0, 2.0**120])
def test_products_with_reciprocals_of_8_bits_encode_as_the_quotients_by_them(unit):
    run = compiled(encode_near_int4)
    numbers = torch.arange(1 << 10, 1 << 11) / (1 << 10) * unit
    x = torch.cat([numbers * 2.0**e * sign for e in range(-5, 7) for sign in (-1, 1)])
    for divisor in torch.arange(1 << 7, 1 << 8) / (1 << 7) * unit:
        scale = divisor.expand(len(x)).contiguous()
        wanted = reference.encode_int4(x / scale)
        assert torch.equal(run(x * (1.0 / scale)), wanted.to(torch.int32)), divisor


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tops_begin_with_the_sign(dtype):
    f = new_kernel()
    source = Source(dtype)
    w = torch.tensor([1.0, -1.0, 0.0, -0.0] * 4).to(getattr(torch, dtype))
    tops = source.tops(source.load(f, f.parameter("w"), f.constant(I64, 0), LANES))
    f.store(tops, f.parameter("qdata"), f.constant(I64, 0))
    f.give(f.constant(I32, 0))
    found = torch.empty(LANES, dtype=torch.int16)
    jit.compile_function(f)(
        *operand_of(w).arguments(), 16, 1, *Operand(data=found).arguments(), 0, 0
    )
    assert torch.equal(found < 0, w.signbit())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_pairs_are_the_weights_of_even_and_of_odd_index(dtype):
    f = new_kernel()
    source = Source(dtype)
    with f.loop(f.constant(I64, 0), f.parameter("rows"), LANES) as at:
        pairs = source.pairs(source.load(f, f.parameter("w"), at, LANES))
        for place, numbers in zip(("qdata", "scale"), pairs, strict=True):
            f.store(numbers, f.parameter(place), at // 2)
    f.give(f.constant(I32, 0))
    w = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    even, odd = torch.empty(32), torch.empty(32)
    result = Operand(data=even, scale=odd)
    jit.compile_function(f)(*operand_of(w).arguments(), 64, 1, *result.arguments(), 0, 0)
    assert torch.equal(torch.stack([even, odd], 1).flatten(), w.float())


DECODERS = {
    "e2m1": (decode_e2m1, 16, reference.decode_e2m1),
    "e4m3": (decode_e4m3, 256, lambda code: code.view(torch.float8_e4m3fn).float()),
    "e8m0": (decode_e8m0, 256, lambda code: code.view(torch.float8_e8m0fnu).float()),
    "int4": (decode_int4, 16, reference.decode_int4),
}


@pytest.mark.parametrize(("ours", "count", "theirs"), DECODERS.values(), ids=DECODERS)
def test_every_code_decodes_to_its_value(ours, count, theirs):
    codes = torch.arange(count, dtype=torch.int32)
    wanted = theirs(codes.to(torch.uint8))
    found = compiled(lambda x: ours(x.bitcast("i32")))(codes.view(torch.float32))
    found = found.view(torch.float32)
    assert torch.equal(found.isnan(), wanted.isnan())
    is_number = ~wanted.isnan()
    assert torch.equal(found[is_number].view(torch.int32), wanted[is_number].view(torch.int32))
