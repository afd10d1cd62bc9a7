"""What `Fp4GroupedGemm` passes to its kernel, which was never run: a model of the kernel reads it.

Calls of `Fp4Plan` run it too; Triton interprets their other kernels.

The model follows the description in sm100_fp4_grouped_gemm.py through the addresses, boxes and
numbers that the launch is given, so that a wrong stride, offset or factor gives a wrong result.
"""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")

from moequant.act_fn import RELU2, SILU, SWIGLUOAI
from moequant.formats.elements import decode_e2m1, decode_e4m3, decode_e8m0, unpack_nibbles
from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.block_scaled_quantize import (
    BlockScaledRows,
    ScalePlaces,
    place_scales,
    quantize_sorted,
)
from moequant.kernels.cutlass import sm100_fp4_fused as fused
from moequant.kernels.cutlass import sm100_fp4_launch as module
from moequant.kernels.cutlass.sm100_fp4_fused import Fp4Plan, batched_experts
from moequant.kernels.cutlass.sm100_fp4_launch import (
    PARAMETER_BYTES,
    Fp4GroupedGemm,
    padded,
    scale_columns,
    scale_words,
)
from moequant.kernels.cutlass.sm100_fp4_variant import MXFP4, NVFP4, VARIANTS
from moequant.kernels.launch import INTERPRETED, stream_of
from moequant.kernels.routing import (
    Grouping,
    SortedRouting,
    max_rows,
    max_tiles,
    sort_routing,
)
from moequant.layouts.swizzle_128x4 import swizzle
from moequant.runtime.block_scaled import nvfp4_token_scale, quantize_mxfp4, quantize_nvfp4

E, N, K = 4, 200, 352  # parts of a tile of weight rows, of a step, and of a tile of scales
COUNTS = (130, 0, 3, 128)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def sorted_ids(counts, *, elsewhere=0):
    """A routing that gives each expert `counts` pairs, others are not here; and its ids."""
    ids = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)] + [-1] * elsewhere)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    ids = ids[:, None].int().to(DEVICE)
    routing = SortedRouting.allocate(
        len(ids), grouping(counts), empty=partial(torch.empty, device=DEVICE)
    )
    sort_routing(ids, routing, grouping(counts))
    return routing, ids


def grouping(counts):
    return Grouping(experts=len(counts), tile_rows=128)


@pytest.mark.parametrize(
    ("rows", "want"), [(0, 0), (1, 128), (127, 128), (128, 128), (129, 256), (300, 384)]
)
def test_rows_are_padded_to_whole_tiles_of_scales(rows, want):
    assert padded(rows) == want


@pytest.mark.parametrize(
    ("K", "group", "want"),
    [(64, 16, 4), (80, 16, 8), (352, 16, 24), (7168, 16, 448), (352, 32, 12), (2880, 32, 92)],
)
def test_scales_of_a_row_fill_tiles_of_four(K, group, want):
    assert scale_columns(K, group) == want


def scale_row_offsets(counts):
    """vLLM's blockscale_offsets: the first padded row of each expert's scales, and the end."""
    return [0, *accumulate(-(-n // 128) * 128 for n in counts)]


@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 1), (128, 128), (1,) * 9, (511, 1, 129, 0, 2)])
def test_the_tiles_of_a_routing_are_the_tiles_of_its_scales(counts):
    assert scale_row_offsets(COUNTS) == [0, 256, 256, 384, 512]
    routing, _ = sorted_ids(counts, elsewhere=5)
    offsets, starts = scale_row_offsets(counts), [sum(counts[:e]) for e in range(len(counts))]
    n = int(routing.tile_count)
    assert 128 * n == offsets[-1]
    for i, (expert, first, _, _) in enumerate(routing.tiles[:n].tolist()):
        assert 128 * i == offsets[expert] + first - starts[expert]


@pytest.mark.parametrize("experts", [1, 4, 128])
def test_there_is_room_for_the_scales_of_as_many_tiles_as_there_may_be(experts):
    # What the quantizer allocates, and what the launch wants.
    for pairs in (1, 3, 4, 127, 128, 129, 1000, 4096):
        assert max_rows(pairs, experts, 128) == 128 * max_tiles(pairs, experts, 128)


def test_scales_are_read_as_one_row_of_words_for_128_rows():
    scale = torch.arange(2 * 256 * 8, dtype=torch.int32).to(torch.uint8).view(2, 256, 8)
    words = scale_words(scale)
    assert words.shape == (4, 128)
    assert words.data_ptr() == scale.data_ptr()
    assert torch.equal(words.view(torch.uint8).flatten(), scale.flatten())
    assert torch.equal(scale_words(scale.view(torch.int32)), words)


class Box:
    """A TMA descriptor: loads a box of bytes, 0 where it is outside the tensor."""

    def __init__(self, tensor, box):
        assert tensor.data_ptr() % 16 == 0
        assert tensor.stride(1) == 1
        assert tensor.stride(0) * tensor.itemsize % 16 == 0
        assert max(box) <= 256
        self.address, self.shape, self.box = tensor.data_ptr(), tuple(tensor.shape), box
        self.stride, self.size = tensor.stride(0) * tensor.itemsize, tensor.itemsize
        # 128 bytes of codes, or scales as they lie: what the kernel's shared memory expects.
        assert tensor.dtype == torch.int64 or box[1] == 128

    def load(self, row, column):
        out = torch.zeros(self.box[0], self.box[1] * self.size, dtype=torch.uint8)
        n = min(self.box[1], self.shape[1] - column) * self.size
        for i in range(max(0, min(self.box[0], self.shape[0] - row))):
            at = self.address + (row + i) * self.stride + column * self.size
            out[i, :n] = memory(at, n)
        return out


def memory(address, size):
    """Bytes at `address`, to be read and written."""
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def numbers(codes, scales, variant):
    """float64 [128, 256] of a step's codes [128, 128] and scales, which are tiles of 512 bytes."""
    r, c = torch.arange(128)[:, None], torch.arange(256 // variant.group)
    scale = scales.flatten()[c // 4 * 512 + r % 32 * 16 + r // 32 * 4 + c % 4]
    return dequantized(codes, scale, variant)


def dequantized(codes, scale, variant):
    """float64 [..., K] of codes [..., K / 2] and of scales in bytes, as rows and columns."""
    if variant.e4m3_scales:
        scale = decode_e4m3(scale.view(torch.float8_e4m3fn))
    else:
        scale = decode_e8m0(scale.view(torch.float8_e8m0fnu))
    values = decode_e2m1(unpack_nibbles(codes)).double()
    return values * scale.double().repeat_interleave(variant.group, -1)


def run_model(variant, blocks, arguments):
    """What the kernel does with the arguments of its launch."""
    for argument, size in zip(arguments, PARAMETER_BYTES, strict=True):
        assert isinstance(argument, Box) if size == 128 else ctypes.sizeof(argument) == size
    maps, shapes = arguments[0:8:2], arguments[1:8:2]
    assert [tuple(shape) for shape in shapes] == [box.shape for box in maps]
    x, w, x_scale, w_scale = maps
    x_factor, alpha, out, tiles, tile_count = (argument.value for argument in arguments[8:13])
    n, k, parts = (argument.value for argument in arguments[13:])
    words, bands = 256 // variant.group * 16, -(-n // 128)
    units = int(memory(tile_count, 4).view(torch.int32)) * bands
    for unit in (u for block in range(blocks) for u in range(block, units, blocks)):
        tile, band = divmod(unit, bands)
        expert, first, rows = memory(tiles + 16 * tile, 12).view(torch.int32).tolist()
        total = torch.zeros(128, 128, dtype=torch.float64)
        for step in range(-(-k // 256)):
            a = x.load(first, 128 * step), x_scale.load(tile, words * step)
            b = (
                w.load(expert * n + 128 * band, 128 * step),
                w_scale.load(expert * bands + band, words * step),
            )
            total += numbers(*a, variant) @ numbers(*b, variant).T
        total = total.float()
        if variant.e4m3_scales:
            factor = memory(x_factor + 4 * first, 4 * rows).view(torch.float32)
            part = torch.arange(128 * band, min(128 * band + 128, n)) // (n // parts)
            alphas = memory(alpha + 4 * expert * parts, 4 * parts).view(torch.float32)[part]
            total[:rows, : len(part)] *= factor[:, None] * alphas
        columns = min(128, n - 128 * band)
        for row in range(rows):
            at = out + 2 * ((first + row) * n + 128 * band)
            memory(at, 2 * columns).copy_(total[row, :columns].bfloat16().view(torch.uint8))


class Problem:
    """Random operands of a routing, and the results it has."""

    def __init__(self, variant, device, *, parts=1, n_out=N):
        g = torch.Generator().manual_seed(1)
        routing, _ = sorted_ids(COUNTS, elsewhere=7)
        pairs = sum(COUNTS) + 7
        groups = K // variant.group

        def codes(*shape):
            return torch.randint(256, (*shape, K // 2), dtype=torch.uint8, generator=g)

        def scales(*shape):
            """Between 1 / 8 and 8, so that float64 has all sums exactly."""
            low, high = (32, 80) if variant.e4m3_scales else (124, 130)
            return torch.randint(low, high, (*shape, groups), generator=g).to(torch.uint8)

        x, x_scale, w, w_scale = codes(pairs), scales(pairs), codes(E, n_out), scales(E, n_out)
        x_factor = torch.rand(pairs, generator=g) + 0.5 if variant.e4m3_scales else None
        alpha = torch.rand(E, parts, generator=g) + 0.5 if variant.e4m3_scales else None
        self.weights = dequantized(w, w_scale, variant)
        # What no row has is NaN, in E4M3 as in E8M0.
        swizzled = torch.full(
            (max_rows(pairs, E, 128), scale_columns(K, variant.group)), 255, dtype=torch.uint8
        )
        self.want = torch.full((pairs, n_out), torch.nan, dtype=torch.bfloat16)
        first = 0
        for e, (n, at) in enumerate(zip(COUNTS, scale_row_offsets(COUNTS), strict=False)):
            rows = slice(first, first + n)
            padding = x_scale.new_full((padded(n) - n, groups), 255)
            swizzled[at : at + padded(n)] = swizzle(torch.cat([x_scale[rows], padding]))
            total = (dequantized(x[rows], x_scale[rows], variant) @ self.weights[e].T).float()
            if variant.e4m3_scales:
                total *= x_factor[rows, None] * alpha[e].repeat_interleave(n_out // parts)
            self.want[rows] = total.bfloat16()
            first += n
        self.out = torch.full((pairs, n_out), torch.nan, dtype=torch.bfloat16, device=device)
        self.operands = {
            "x": x,
            "x_scale": swizzled,
            "x_factor": x_factor,
            "w": w,
            "w_scale": swizzle(w_scale),
            "alpha": alpha,
            "tiles": routing.tiles,
            "tile_count": routing.tile_count,
        }
        self.operands = {k: v if v is None else v.to(device) for k, v in self.operands.items()}


@pytest.fixture
def launches(monkeypatch):
    """Launches made, instead of the driver's, which run the model: (kernel, blocks, arguments)."""
    made = []

    def launch(kernel, blocks, arguments):
        made.append((kernel, blocks, arguments))
        return lambda stream: run_model(kernel[0], blocks, arguments)

    monkeypatch.setattr(module, "Launch", launch)
    monkeypatch.setattr(module, "tensor_map", Box)
    monkeypatch.setattr(module, "_kernel", lambda variant, device: (variant, device))
    monkeypatch.setattr(module, "_multiprocessors", lambda device: 3)
    return made


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [(NVFP4, {}), (NVFP4, {"parts": 2, "n_out": 192}), (MXFP4, {})],
    ids=["nvfp4", "nvfp4_gate_up", "mxfp4"],
)
def test_the_launch_multiplies_each_expert_s_rows_by_its_weights(variant, sizes, launches):
    problem = Problem(variant, torch.device("cpu"), **sizes)
    Fp4GroupedGemm(variant, **problem.operands, out=problem.out)(0)
    ((kernel, blocks, _),) = launches
    assert kernel == (variant, 0)
    assert blocks == 3
    torch.testing.assert_close(problem.out, problem.want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("variant", "static"),
    [
        pytest.param(NVFP4, False, marks=pytest.mark.full),
        (NVFP4, True),
        pytest.param(MXFP4, False, marks=pytest.mark.full),
    ],
    ids=["nvfp4", "nvfp4_static", "mxfp4"],
)
def test_it_multiplies_what_the_quantizer_writes(variant, static, launches):
    problem = Problem(variant, torch.device("cpu"))
    routing, ids = sorted_ids(COUNTS, elsewhere=7)
    pairs = len(ids)
    hidden = torch.randn(pairs, K, generator=torch.Generator().manual_seed(2)).bfloat16()
    scales = torch.rand(E, generator=torch.Generator().manual_seed(3)) / 1000 + 1e-3
    empty = partial(torch.empty, device=DEVICE)
    places = ScalePlaces.allocate(pairs, E, empty=empty)
    rows = BlockScaledRows.allocate(variant.name, pairs, K, E, empty=empty)
    place_scales(ids, routing, places, grouping(COUNTS))
    quantize_sorted(
        hidden.to(DEVICE),
        rows,
        routing,
        places,
        topk=1,
        static=scales.to(DEVICE) if static else None,
    )
    problem.operands |= {"x": rows.codes.cpu(), "x_scale": rows.scale.cpu()}
    if variant is NVFP4:
        problem.operands["x_factor"] = rows.global_scale.cpu()
    Fp4GroupedGemm(variant, **problem.operands, out=problem.out)(0)
    for pair, row in enumerate(routing.row_of_pair.tolist()):
        if row < 0:
            continue
        expert = int(ids[pair])
        x, factor = hidden[pair : pair + 1].float(), torch.ones(1, 1)
        if variant is NVFP4:
            factor = scales[None, expert : expert + 1] if static else nvfp4_token_scale(x)
            codes, scale = quantize_nvfp4(x, factor)
            factor = factor * problem.operands["alpha"][expert, 0]
        else:
            codes, scale = quantize_mxfp4(x)
        total = dequantized(codes, scale.view(torch.uint8), variant) @ problem.weights[expert].T
        assert torch.equal(problem.out[row], (total.float() * factor).bfloat16()[0])


def test_there_are_no_more_ctas_than_units(launches):
    problem = Problem(NVFP4, torch.device("cpu"))
    problem.operands["tiles"] = problem.operands["tiles"][:1]
    Fp4GroupedGemm(NVFP4, **problem.operands, out=problem.out)
    assert launches[0][1] == 2  # a tile by two bands of weight rows


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("name", ["alpha", "x_factor"])
def test_factors_are_given_where_the_format_has_them(variant, name, launches):
    problem = Problem(variant, torch.device("cpu"))
    problem.operands[name] = torch.ones(512, 1) if variant is MXFP4 else None
    with pytest.raises(AssertionError):
        Fp4GroupedGemm(variant, **problem.operands, out=problem.out)


def quantized(x, static, variant):
    """Rows of float32 as a GEMM reads them, float64, and their factors."""
    if variant is MXFP4:
        codes, scale = quantize_mxfp4(x)
        return dequantized(codes, scale.view(torch.uint8), variant), torch.ones(len(x), 1)
    factor = nvfp4_token_scale(x) if static is None else static
    codes, scale = quantize_nvfp4(x, factor)
    return dequantized(codes, scale.view(torch.uint8), variant), factor


def by_expert(variant, tensors, act, hidden, topk_weights, topk_ids):
    """The layer, pair by pair, rounded where `Fp4Plan` rounds: [M, H] float32."""
    out = torch.zeros(hidden.shape)
    for m, t in (topk_ids >= 0).nonzero().tolist():
        e = int(topk_ids[m, t])

        def linear(x, of, e=e):
            static = tensors.get(f"{of}_input_scale")
            x, factor = quantized(x, None if static is None else static[e].view(1, 1), variant)
            w = dequantized(tensors[f"{of}_qdata"][e], tensors[f"{of}_plain_scale"][e], variant)
            y = (x @ w.T).float()
            if variant is NVFP4:
                alpha = tensors[f"{of}_global_scale"].view(len(tensors["w2_qdata"]), -1)[e]
                y = y * (factor * alpha.repeat_interleave(len(w) // len(alpha)))
            return y.bfloat16().float() + tensors.get(f"{of}_bias", torch.zeros(e + 1, 1))[e]

        y = linear(hidden[m : m + 1].float(), "w13")
        halves = y.chunk(2, 1) if act.gated else (None, y)
        out[m] += topk_weights[m, t] * linear(act(*halves), "w2")[0]
    return out


def layer_of(variant, act, given, experts, H, I):
    """The tensors of a layer, with those of the optional ones that are `given`."""
    g = torch.Generator().manual_seed(4)
    tensors, rows = {}, {"w13": (1 + act.gated) * I, "w2": H}
    for of, k in (("w13", H), ("w2", I)):
        low, high = (40, 64) if variant.e4m3_scales else (122, 126)
        shape = (experts, rows[of], k // variant.group)
        scale = torch.randint(low, high, shape, generator=g).to(torch.uint8)
        tensors[f"{of}_qdata"] = torch.randint(
            256, (experts, rows[of], k // 2), dtype=torch.uint8, generator=g
        )
        tensors |= {f"{of}_plain_scale": scale, f"{of}_scale": swizzle(scale)}
        tensors[f"{of}_bias"] = torch.randn(experts, rows[of], generator=g)
        tensors[f"{of}_input_scale"] = torch.rand(experts, generator=g) / 100 + 1e-3
    if variant is NVFP4:
        tensors["w13_global_scale"] = torch.rand(experts, 2, generator=g)
        tensors["w2_global_scale"] = torch.rand(experts, generator=g)
    optional = ("w13_bias", "w2_bias", "w13_input_scale", "w2_input_scale")
    return {k: v for k, v in tensors.items() if k not in optional or k in given}


def check(got, want):
    """The same values are rounded, but for exp, which is good to a few ulp of float32, and the
    order of sums: no code is expected to differ, and a result in bfloat16 rarely, by 2**-8.
    """
    assert ((got - want).abs() <= 2**-8 * want.abs().amax(1, keepdim=True)).all()
    assert (got == want).float().mean() > 0.9


LAYERS = {
    "nvfp4": (NVFP4, SILU, ()),
    "nvfp4_static_bias": (
        NVFP4, SILU, ("w13_input_scale", "w2_input_scale", "w13_bias", "w2_bias")
    ),
    "mxfp4_bias": (MXFP4, SWIGLUOAI, ("w13_bias",)),
    "mxfp4_no_gate": (MXFP4, RELU2, ()),
}  # fmt: skip


def each_layer(*, full=()):
    """Those called `full` in make test-full alone."""
    params = [
        pytest.param(*layer, id=name, marks=pytest.mark.full if name in full else ())
        for name, layer in LAYERS.items()
    ]
    return pytest.mark.parametrize(("variant", "act", "given"), params)


on_cpu = pytest.mark.skipif(not INTERPRETED, reason="the model reads memory of the CPU")


@pytest.fixture
def no_stream(monkeypatch):
    monkeypatch.setattr(fused, "stream_of", lambda device: 0)


@on_cpu
@each_layer()
def test_a_layer_is_its_experts_weighted(variant, act, given, launches, no_stream):
    M, T, experts, H, I = 5, 2, 3, 96, 160
    tensors = layer_of(variant, act, given, experts, H, I)
    g = torch.Generator().manual_seed(5)
    arena = WorkspaceArena()
    Fp4Plan(variant, tensors, act, M, T, arena)
    memory_of_call = torch.full((arena.size_bytes,), 255, dtype=torch.uint8)
    plan = Fp4Plan(variant, tensors, act, M, T, WorkspaceArena(memory_of_call))
    topk_ids = torch.tensor([[0, 2], [2, -1], [2, 0], [0, 2], [2, 0]], dtype=torch.int32)
    for ids in (topk_ids, topk_ids.flip(0)):
        hidden = torch.randn(M, H, generator=g).bfloat16()
        topk_weights = torch.rand(M, T, generator=g)
        out = torch.full((M, H), torch.nan, dtype=torch.float32)
        plan(hidden, topk_weights, ids, out)
        # The second call encodes no descriptor: it launches what the first one made.
        assert [blocks for _, blocks, _ in launches] == [3, 3]
        check(out, by_expert(variant, tensors, act, hidden, topk_weights, ids))


@on_cpu
@each_layer(full=("nvfp4", "mxfp4_no_gate", "nvfp4_static_bias"))
def test_batches_are_the_rows_of_their_experts(variant, act, given, launches, no_stream):
    experts, capacity, H, I = 4, 131, 96, 160
    tensors = layer_of(variant, act, given, experts, H, I)
    counts = torch.tensor([2, 0, 999, 1], dtype=torch.int32)  # 999 counts as 131
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(experts, capacity, H, generator=g).bfloat16()
    got = batched_experts(variant, tensors, act, hidden, counts)
    assert [blocks for _, blocks, _ in launches] == [3, 3]
    assert got.shape == hidden.shape
    assert got.dtype == (torch.float32 if "w2_bias" in given else torch.bfloat16)
    for expert, rows in ((0, range(2)), (2, (0, 127, 128, 130)), (3, range(1))):
        x = hidden[expert, list(rows)]
        ids = torch.full((len(x), 1), expert, dtype=torch.int32)
        want = by_expert(variant, tensors, act, x, torch.ones(len(x), 1), ids)
        check(got[expert, list(rows)].float(), want)


@on_cpu
@pytest.mark.filterwarnings("ignore:.* encountered in")  # NumPy, in the interpreter
def test_nothing_is_read_on_the_host(launches, no_stream, host_reads, monkeypatch):
    # In place of the model, which reads, one that leaves what memory holds; the other kernels are
    # Triton's, which see addresses.
    monkeypatch.setattr(module, "Launch", lambda *of: launches.append(of) or (lambda stream: None))
    M, T, experts, H = 5, 2, 3, 96
    tensors = layer_of(NVFP4, SILU, ("w13_input_scale", "w2_input_scale"), experts, H, 160)
    size = WorkspaceArena()
    Fp4Plan(NVFP4, tensors, SILU, M, T, size)
    plan = Fp4Plan(
        NVFP4,
        tensors,
        SILU,
        M,
        T,
        WorkspaceArena(torch.zeros(size.size_bytes, dtype=torch.uint8)),
    )
    ids, counts = torch.zeros(M, T, dtype=torch.int32), torch.tensor([1, 0, 4]).int()
    with host_reads as reads:
        plan(torch.ones(M, H), torch.ones(M, T), ids, torch.empty(M, H))
        batched_experts(NVFP4, tensors, SILU, torch.ones(experts, 4, H), counts)
        assert not reads.found
        assert bool(counts[0])
        assert reads.found
    assert len(launches) == 4


def test_batches_without_places_have_no_result(launches):
    tensors = layer_of(NVFP4, SILU, (), 2, 32, 32)
    got = batched_experts(NVFP4, tensors, SILU, torch.ones(2, 0, 32), torch.zeros(2).int())
    assert got.shape == (2, 0, 32)
    assert not launches


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (10, 0),
    reason="needs a GPU of SM100 (B200)",
)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_the_kernel_agrees_on_a_gpu(variant):
    problem = Problem(variant, torch.device("cuda"))
    Fp4GroupedGemm(variant, **problem.operands, out=problem.out)(stream_of(problem.out.device))
    live = sum(COUNTS)
    assert bool(problem.out[live:].isnan().all())
    got, want = problem.out[:live].cpu().double(), problem.want[:live].double()
    # Both are rounded to bfloat16, by at most 2**-9. A tensor core that keeps 13 bits below the
    # largest addend, as Hopper's does, adds less than 2**-13 of it for each of K / 64 steps.
    assert (got - want).norm() <= (2 * 2**-9 + K / 64 * 2**-13) * want.norm()
