"""Codes and scales of the kernels against the reference, bit for bit, in the orders of the layouts.

The places of scales are written out here, by row and column, and what must not be written is seen
by its bytes.
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from moequant.formats.elements import encode_e2m1
from moequant.kernels.block_scaled_quantize import (
    _TENTH,
    BlockScaledRows,
    ScalePlaces,
    by_2688,
    place_scales,
    quantize_sorted,
    reciprocal,
)
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.routing import Grouping, SortedRouting, sort_routing
from moequant.layouts.deepgemm_scale import pack_ue8m0
from moequant.layouts.swizzle_128x4 import unswizzle
from moequant.runtime.activations import GROUPS, quantize_activations

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SCHEMES = ["nvfp4", "nvfp4_static", "mxfp4", "mxfp8"]
UNTOUCHED = 0xA5

# How the kernel encodes E2M1 and divides, in PTX.
LINES = r"fma\.rn\.f32\s+%\w+, %\w+, 0f(40000000|3F000000|3DCCCCCC), 0f\w+;"
RECIPROCAL = (
    r"rcp\.approx\.ftz\.f32 guess, (%\w+);\s+neg\.f32 negative, \1;\s+"
    r"fma\.rn\.f32 error, negative, guess, 0f3F800000;\s+"
    r"fma\.rn\.f32 %\w+, guess, error, guess;"
)
BY_2688 = (
    r"mul\.rn\.f32 guess, (%\w+), 0f39C30C31;\s+"
    r"fma\.rn\.f32 error, guess, 0fC5280000, \1;\s+"
    r"fma\.rn\.f32 %\w+, error, 0f39C30C31, guess;"
)


def poisoned(*shape, dtype):
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.full((size,), UNTOUCHED, dtype=torch.uint8, device=DEVICE).view(dtype).view(shape)


def sorted_pairs(ids, experts, alignment, expert_map=None):
    grouping = Grouping(experts=experts, tile_rows=64, alignment=alignment)
    ids = ids.to(DEVICE)
    here = None if expert_map is None else expert_map.to(DEVICE)
    routing = SortedRouting.allocate(ids.numel(), grouping, empty=poisoned)
    routing.pair_of_row.zero_()  # as an earlier routing may have left the gaps
    sort_routing(ids, routing, grouping, expert_map=here)
    places = ScalePlaces.allocate(ids.numel(), experts, empty=poisoned)
    place_scales(ids, routing, places, grouping, expert_map=here)
    return routing, places


def hidden(rows, K, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-8, 8, (rows, K // 16), generator=g).repeat_interleave(16, 1)
    x = torch.randn(rows, K, generator=g) * 2.0**exponent
    x[0] = 0
    x[1, :32] = -0.0
    x[2, :64] *= 2.0**-30
    return x.to(dtype)


def quantized(x, scheme, routing, places, experts, *, topk=None, static=None):
    """What the kernel makes of `x`."""
    rows = routing.pair_of_row.shape[0]
    out = BlockScaledRows.allocate(
        scheme.removesuffix("_static"), rows, x.shape[1], experts, empty=poisoned
    )
    static = None if static is None else static.to(DEVICE)
    quantize_sorted(x.to(DEVICE), out, routing, places, topk=topk, static=static)
    return out


def expected(x_of_row, expert_of_row, scheme, K, out, offsets, static):
    """Bytes of codes, scales and global scales where everything else is untouched.

    Args:
        x_of_row: the values of each row that is used, by row.
        expert_of_row: its expert, and its place among the expert's rows.
        offsets: the first row of each expert's scales.
    """
    codes = torch.full(out.codes.shape, UNTOUCHED, dtype=torch.uint8)
    scale = torch.full((out.scale.nbytes,), UNTOUCHED, dtype=torch.uint8)
    columns = K // GROUPS[scheme]
    padded = -(-columns // 4) * 4
    rows_padded = out.scale.shape[1]
    globals_ = {}
    for row, x in x_of_row.items():
        e, i = expert_of_row[row]
        own = None if static is None else static[e : e + 1]
        q = quantize_activations(x[None], scheme, static_scale=own)
        codes[row] = q.qdata.view(torch.uint8)[0]
        for c in range(padded):
            byte = q.scale.view(torch.uint8)[0, c] if c < columns else 0
            if scheme == "mxfp8":
                place = (c // 4 * rows_padded + row) * 4 + c % 4
            else:
                r = offsets[e] + i
                tile = r // 128 * (padded // 4) + c // 4
                place = 512 * tile + 16 * (r % 32) + 4 * (r // 32 % 4) + c % 4
            scale[place] = byte
        if q.global_scale is not None:
            globals_[row] = q.global_scale[0, 0]
    return codes, scale, globals_


def rows_of(routing, places, experts):
    """The pair of each row that is used; the expert of each, and its place there."""
    pair_of, expert_of = {}, {}
    experts_of_pairs = places.expert_of_pair.tolist()
    seen = [0] * experts
    for pair, row in sorted(enumerate(routing.row_of_pair.tolist()), key=lambda item: item[1]):
        if row < 0:
            continue
        e = experts_of_pairs[pair]
        pair_of[row], expert_of[row] = pair, (e, seen[e])
        seen[e] += 1
    return pair_of, expert_of, seen


def check(x, scheme, ids, experts, *, alignment=1, gathered=True, expert_map=None, static=None):
    routing, places = sorted_pairs(ids, experts, alignment, expert_map)
    pair_of, expert_of, counts = rows_of(routing, places, experts)
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + -(-count // 128) * 128)
    assert places.scale_offsets.tolist() == offsets
    T = ids.shape[1]
    if not gathered:
        x = x[: routing.pair_of_row.shape[0]]
    out = quantized(
        x, scheme, routing, places, experts, topk=T if gathered else None, static=static
    )
    x_of_row = {row: x[pair // T if gathered else row] for row, pair in pair_of.items()}
    want = expected(x_of_row, expert_of, scheme, x.shape[1], out, offsets, static)
    codes, scale, globals_ = want
    assert torch.equal(out.codes.cpu(), codes)
    assert torch.equal(out.scale.cpu().view(torch.uint8).flatten(), scale)
    for row, value in globals_.items():
        assert torch.equal(out.global_scale[row].cpu().nan_to_num(-1), value.nan_to_num(-1))
    return out, routing, places


STATIC = torch.tensor([2.0**-6, 0.003, 1.7, 2.0**-9])


def static_of(scheme):
    return STATIC if scheme == "nvfp4_static" else None


@pytest.mark.parametrize(
    ("K", "dtype"), [(32, torch.bfloat16), (96, torch.float16), (320, torch.float32)]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_that_are_gathered_equal_the_reference(scheme, K, dtype):
    ids = torch.rand(13, 4, generator=torch.Generator().manual_seed(K)).topk(2).indices.int()
    ids[5] = -1
    check(hidden(13, K, dtype), scheme, ids, 4, static=static_of(scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_are_sorted_equal_the_reference(scheme):
    ids = torch.randint(0, 4, (20, 2), generator=torch.Generator().manual_seed(1))
    check(hidden(40, 128), scheme, ids, 4, gathered=False, static=static_of(scheme))


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_a_row_longer_than_a_block_equals_the_reference(scheme):
    check(hidden(3, 4096 + 96), scheme, torch.tensor([[0], [1], [0]]), 2)


@pytest.mark.parametrize("topk", [3, 1, None])
@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
def test_experts_at_multiples_of_rows_and_ids_of_another_rank(scheme, topk):
    ids = torch.randint(0, 6, (17, topk or 3), generator=torch.Generator().manual_seed(2))
    here = torch.tensor([2, -1, 0, 3, -1, 1])
    x = hidden(17 if topk else 128, 64)
    check(x, scheme, ids, 4, alignment=16, gathered=topk is not None, expert_map=here)


@pytest.mark.parametrize("scheme", ["nvfp4_static", pytest.param("mxfp4", marks=pytest.mark.full)])
def test_experts_of_many_rows_and_of_none_have_tiles_of_their_own(scheme):
    """Expert 0 has 130 rows and two tiles, 1 none and no tile, 2 exactly 128, 3 one row."""
    ids = torch.tensor([0] * 130 + [2] * 128 + [3])[:, None]
    ids = ids[torch.randperm(259, generator=torch.Generator().manual_seed(3))]
    _, _, places = check(hidden(259, 32), scheme, ids, 4, static=static_of(scheme))
    assert places.scale_offsets.tolist() == [0, 256, 256, 384, 512]
    assert places.expert_offsets.tolist() == [0, 130, 130, 258, 259]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, in the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_inf_and_the_extremes_of_float32_equal_the_reference(scheme):
    x = hidden(10, 96, torch.float32)  # with scales of padding, which stay 0
    x[3, 40], x[4, 3], x[5, 63] = torch.nan, -torch.inf, torch.inf
    x[6] = 2.0**-149
    x[7, ::3] = 3.4e38
    x[8, :32] = 2.0**-126
    x[9, 5] = -3e-39
    ids = torch.arange(10)[:, None] % 4
    check(x, scheme, ids, 4, static=static_of(scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tie_and_limit_of_codes_and_scales_equals_the_reference(scheme):
    """All BF16 numbers of four octaves, as values and as the largest of their groups."""
    numbers = torch.arange(0x3F00, 0x4100, dtype=torch.int16).view(torch.bfloat16)
    x = torch.zeros(512, 32, dtype=torch.bfloat16)
    x[:, 0] = numbers
    x[:, 1:16] = numbers.flip(0)[:, None] * torch.linspace(-1, 1, 15).bfloat16()
    x[:, 16:] = numbers[:, None] * torch.linspace(-1, 0.98, 16).bfloat16()
    x[:, 7] = 0
    x = x.view(8, 64 * 32)
    check(x, scheme, torch.arange(8)[:, None] % 4, 4, static=static_of(scheme))


def test_no_pair_at_all_and_no_pair_here():
    routing, places = sorted_pairs(torch.empty(0, 2, dtype=torch.int32), 4, 1)
    quantized(torch.empty(0, 32).bfloat16(), "mxfp4", routing, places, 4, topk=2)
    routing, places = sorted_pairs(torch.full((3, 2), -1), 4, 1)
    assert places.scale_offsets.tolist() == [0] * 5
    assert places.expert_offsets.tolist() == [0] * 5
    out = quantized(hidden(3, 32), "nvfp4", routing, places, 4, topk=2)
    assert (out.codes == UNTOUCHED).all()
    assert (out.scale.view(torch.uint8) == UNTOUCHED).all()


def test_scales_are_in_the_orders_of_the_layouts():
    """The same through the layouts' own inverses: one expert of 128 rows, whole tiles."""
    x = hidden(128, 256)
    ids = torch.zeros(128, 1, dtype=torch.int64)
    out, *_ = check(x, "mxfp4", ids, 1)
    want = quantize_activations(x, "mxfp4").scale
    swizzled = out.scale.cpu().view(torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(unswizzle(swizzled, 128, 8).view(torch.uint8), want.view(torch.uint8))
    out, *_ = check(x, "mxfp8", ids, 1)
    want = quantize_activations(x, "mxfp8").scale
    assert torch.equal(out.scale.cpu(), pack_ue8m0(want, 128, block_n=1))


@pytest.mark.parametrize(
    "capability", [100, *(pytest.param(c, marks=pytest.mark.full) for c in (80, 90, 120))]
)
def test_kernels_compile_and_round_nothing_but_what_the_reference_rounds(compiled_by, capability):
    kernels = compiled_by("compile_block_scaled.py", str(capability))
    assert [k["scheme"] for k in kernels] == [None, "nvfp4", "nvfp4", "mxfp4", "mxfp8"]
    for kernel in kernels:
        # An approximate quotient, a flushed denormal or a sum with a product that was not rounded
        # would differ; products with 2 and 0.5 are exact, and that with 0.1 is meant to be fused.
        ptx = re.sub(r"^\s*\.loc\b.*\n", "", kernel["ptx"], flags=re.MULTILINE)
        ptx, divisions = re.subn(RECIPROCAL, "", ptx)
        ptx, token_scales = re.subn(BY_2688, "", ptx)
        is_nvfp4, is_static = kernel["scheme"] == "nvfp4", kernel["static"]
        assert divisions == (8 if is_nvfp4 else 0)
        assert token_scales == (is_nvfp4 and not is_static)
        assert not re.search(r"\b(div|rcp)\.|\.ftz\.", ptx)
        assert not re.search(r"\b(mul|add|sub)\.f32\b", ptx)  # ptxas may fuse these
        for fused in re.findall(r"\bfma.*;", ptx):
            assert re.fullmatch(LINES, fused)


def test_the_least_of_three_lines_is_the_code_of_a_magnitude_below_15():
    """All BF16 numbers and the float32 on both sides of each, in float64, where lines are exact."""
    x = torch.arange(0x4170, dtype=torch.int16).view(torch.bfloat16).float()
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    x = torch.cat([x, x.nextafter(up), x.nextafter(down)])
    wide = x.double()
    steep, middle, flat = (wide * 2).round(), wide.round() + 2, (wide * _TENTH.value + 6).round()
    lines = torch.stack([steep, middle, flat])
    assert torch.equal(lines.amin(0), encode_e2m1(x).double())


def test_a_step_of_newtons_method_rounds_reciprocals_correctly():
    """From either float32 beside 1 / x, for every x from 1 to 2, in integers.

    But for the last x, of which only the upper one will do, the nearest one.
    """
    x = torch.arange(2**23, 2**24)
    below = 2**47 // x
    nearest = below + (2 * (2**47 - below * x) > x)
    for guess in (below, below + 1):
        error = 2**47 - guess * x
        assert error.abs().max() <= 2**24  # so float32 is exact
        stepped = guess + rounded_shift(guess * error, 47, guess)
        wrong = x[stepped != nearest].tolist()
        assert wrong == ([2**24 - 1] if guess is below else [])


def rounded_shift(x, bits, to):
    """x / 2**bits to the nearest integer; ties to where the sum with `to` is even."""
    whole = x >> bits
    twice = 2 * (x - (whole << bits)) - (1 << bits)
    return whole + ((twice > 0) | ((twice == 0) & ((whole + to) % 2 == 1)))


@triton.jit
def divide_numbers(x, reciprocals, by_2688s, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    number = tl.load(x + at)
    tl.store(reciprocals + at, reciprocal(number))
    tl.store(by_2688s + at, by_2688(number))


@pytest.mark.parametrize("exponent", [-117, -103, 0, 125])
def test_quotients_of_every_mantissa_are_correctly_rounded(exponent):
    mantissas = 2**14 if INTERPRETED else 2**23
    bits = torch.arange(2**23 - mantissas, 2**23, dtype=torch.int32) + (exponent + 127 << 23)
    x = bits.view(torch.float32)
    of_one, of_x = (torch.empty_like(x, device=DEVICE) for _ in range(2))
    divide_numbers[(mantissas // 1024,)](x.to(DEVICE), of_one, of_x, CHUNK=1024)
    # float64 has more than twice the bits, so rounding twice is rounding once.
    assert torch.equal(of_one.cpu(), x.double().reciprocal().float())
    want = (x.double() / 2688).float().clamp(min=2.0**-117)
    assert torch.equal(of_x.cpu().clamp(min=2.0**-117), want)


@triton.jit
def copy_part(x, y, READ: tl.constexpr, WRITTEN: tl.constexpr):
    """Read words and write the largest of every few: no arithmetic that could take time."""
    block = tl.program_id(0).to(tl.int64)
    words = tl.load(x + block * READ + tl.arange(0, READ))
    most = tl.max(tl.reshape(words, [WRITTEN, READ // WRITTEN]), 1)
    tl.store(y + block * WRITTEN + tl.arange(0, WRITTEN), most)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8"])
def test_rows_are_quantized_at_the_speed_of_hoppers_memory(scheme):
    """FP4: 3 TB/s of BF16 on an H200 that reads 4.45 TB/s, and as much of what another GPU reads.

    4.45 is the bandwidth of the floors in docs/kernels.md; H200s read 4.34 to 4.46. All: at least
    four fifths of what a kernel reads that writes as many bytes and does nothing else, so that a
    slower kernel is noticed. To MXFP8, 3 TB/s are more than that kernel reads.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of SM90")
    from moequant.benchmarks.cuda_timing import measure_read_tb_per_s, time_interleaved

    M, K, E = 65536, 7168, 256
    ids = torch.arange(M, dtype=torch.int32)[:, None] % E
    routing, places = sorted_pairs(ids, E, 128 if scheme == "mxfp8" else 1)
    x = torch.randn(M, K, device=DEVICE).bfloat16()
    rows = routing.pair_of_row.shape[0]
    out = BlockScaledRows.allocate(scheme, rows, K, E, empty=poisoned)
    words = x.view(torch.int32).flatten()
    part = 2 if scheme == "mxfp8" else 4
    copied = torch.empty_like(words[: words.numel() // part])
    READ = 4096
    times = time_interleaved(
        {
            "quantized": [lambda: quantize_sorted(x, out, routing, places, topk=1)],
            "copied": [
                lambda: copy_part[(words.numel() // READ,)](
                    words, copied, READ=READ, WRITTEN=READ // part
                )
            ],
        }
    )
    rates = {name: x.nbytes / time.median_us / 1e6 for name, time in times.items()}
    rates["read"] = measure_read_tb_per_s(torch.device(DEVICE))
    print(f"TB/s of BF16, {scheme}:", rates)
    assert rates["quantized"] >= 0.8 * rates["copied"], rates
    assert scheme == "mxfp8" or rates["quantized"] > 3 / 4.45 * rates["read"], rates
