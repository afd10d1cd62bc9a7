"""What the kernel computes, step by step on a CPU: how TMA and WGMMA address, and the epilogue."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels import cuda_driver
from moequant.kernels.cuda_driver import tensor_map
from moequant.kernels.sm90.panels import rows_of_panels
from moequant.kernels.sm90_fp8_channel.sm90_fp8_channel_fused import (
    Fp8ChannelGemmConfig,
    rows_by_block,
)

COMPILER = shutil.which("g++")
E = 2
# (gated, columns of the output, K): whole units, last units of a part, half a block along K.
SHAPES = [
    (True, 256, 256),
    (True, 144, 128),
    (True, 336, 192),
    (False, 512, 256),
    (False, 96, 128),
    (False, 352, 192),
]
every_shape = pytest.mark.parametrize(("gated", "n_out", "K"), SHAPES)


def config(gated, n_out, K, **fields):
    act = "silu" if gated else None
    return Fp8ChannelGemmConfig(act=act, gated=gated, rows=8, K=K, n_out=n_out, **fields)


def swizzled(address):
    """Where the 128-byte swizzle puts a byte: bits 4 to 6 are combined with bits 7 to 9."""
    return address ^ (address >> 3 & 0x70)


def load_box(view, box, start):
    """A box as TMA writes it: [bytes], 0 outside of the tensor, and swizzled."""
    out = view.new_zeros(box)
    inside = tuple(
        slice(at, min(at + n, size)) for at, n, size in zip(start, box, view.shape, strict=True)
    )
    part = view[inside]
    out[tuple(slice(0, n) for n in part.shape)] = part
    memory = torch.zeros(out.numel(), dtype=view.dtype)
    memory[swizzled(torch.arange(out.numel()))] = out.flatten()
    return memory


def box_of(c, expert, n, block, k):
    """`load_weights` of the kernel: groups of a block of unit n, and where the box starts."""
    groups = c.tail_groups if c.tail_groups > 0 and n == c.units_n - 1 else 8
    if c.gated:
        first, half = (expert * c.w_rows + n * 128) // 16 + block * (c.n_out // 16), 0
    else:
        first, half = (expert * c.w_rows + n * 256) // 32, 2 * block
    return groups, (first, half, 0, 0, k * 128)


def load_block(c, weight, expert, n, block, k):
    """A block of a unit in shared memory, whatever was there behind the last rows."""
    memory = torch.full((16384,), 0x7F, dtype=torch.uint8)  # NaN
    groups, start = box_of(c, expert, n, block, k)
    box = (groups, 2, 4, 2, 128)
    loaded = load_box(rows_by_block(weight.flatten(0, 1), gated=c.gated), box, start)
    memory[: loaded.numel()] = loaded
    return memory


def operand(memory, group):
    """[64, 128]: the M operand of a warpgroup, as a descriptor of 128-byte rows addresses it."""
    row, column = torch.arange(64)[:, None], torch.arange(128)[None]
    return memory[group * 8192 + swizzled(row // 8 * 1024 + row % 8 * 128 + column)]


def first_column(c, n, group, warp):
    return n * 128 + group * 64 + warp * 16 if c.gated else n * 256 + group * 128 + warp * 32


def weight_row(c, n, block, half, f):
    if c.gated:
        return block * c.n_out + n + f // 2 * 4 + half * 2 + f % 2
    return n + f // 2 * 8 + block * 4 + half * 2 + f % 2


def values(codes):
    return codes.view(torch.float8_e4m3fn).float()


@every_shape
def test_a_warpgroup_multiplies_the_rows_whose_sums_it_has(gated, n_out, K):
    """Every row of WGMMA is the one that `weight_row` says, and none is left out."""
    c = config(gated, n_out, K)
    g = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (E, c.w_rows, K), dtype=torch.uint8, generator=g)
    padded = torch.nn.functional.pad(weight, (0, -K % 128))
    seen = set()
    for expert, n, block, group in cells(c):
        for k in range(-(-K // 128)):
            rows = operand(load_block(c, weight, expert, n, block, k), group)
            for m in range(64):
                warp, half, f = m // 16, m % 16 // 8, m % 8
                first = first_column(c, n, group, warp)
                if first < n_out:
                    row = weight_row(c, first, block, half, f)
                    seen.add((expert, row))
                    assert torch.equal(rows[m], padded[expert, row, k * 128 : k * 128 + 128])
    assert len(seen) == E * c.w_rows


def cells(c):
    return [
        (expert, n, block, group)
        for expert in range(E)
        for n in range(c.units_n)
        for block in range(2)
        for group in range(2)
    ]


@pytest.mark.parametrize("gated", [True, False])
def test_rows_lie_as_in_panels(gated):
    """The order for which bf16_output.cuh was written, and has run with other families."""
    rows = torch.arange(512)[:, None] + torch.zeros(1, 16, dtype=torch.long)
    weight = rows.view(1, 512, 16)
    panels = rows_of_panels(*weight.split(256, 1)) if gated else rows_of_panels(weight)
    # [panel, block, warp, a, half, b] to the rows of WGMMA: half before a.
    panels = panels[0, ..., 0].transpose(3, 4).flatten(2)
    view = rows_by_block(rows, gated=gated)[..., 0]
    for panel in range(panels.shape[0]):
        n, group = divmod(panel, 2)
        for block in range(2):
            groups = slice((n + block * 2) * 8, None) if gated else slice(n * 8, None)
            halves = slice(None) if gated else slice(2 * block, 2 * block + 2)
            box = view[groups, halves][:8].flatten()
            assert torch.equal(box[group * 64 : group * 64 + 64], panels[panel, block])


def multiply(c, weight, expert, n, group, x):
    """Fragments of the sums of a warpgroup: [block, thread, tokens / 2]."""
    tokens = x.shape[0]
    sums = torch.zeros(2, 64, tokens)
    for k in range(-(-c.K // 128)):
        of_x = torch.nn.functional.pad(x, (0, -c.K % 128))[:, k * 128 : k * 128 + 128]
        for block in range(2):
            w = operand(load_block(c, weight, expert, n, block, k), group)
            sums[block] += values(w) @ values(of_x).T
    thread, i = torch.arange(128)[:, None], torch.arange(tokens // 2)[None]
    row = thread // 32 * 16 + thread % 32 // 4 + i % 4 // 2 * 8
    token = i // 4 * 8 + thread % 4 * 2 + i % 2
    return sums[:, row, token]


def transpose_matrix(words):
    """movmatrix: [warp, lane, 2] of which lane l has row l / 4, columns 2 * (l % 4) and next."""
    matrix = words.view(-1, 8, 4, 2).reshape(-1, 8, 8)
    return matrix.transpose(1, 2).reshape(-1, 32, 2)


@every_shape
def test_the_steps_of_a_call_make_the_product(gated, n_out, K):
    c = config(gated, n_out, K)
    g = torch.Generator().manual_seed(0)
    tokens = 16

    def codes(*size):
        integers = torch.randint(-8, 9, size, generator=g).float()
        return integers.to(torch.float8_e4m3fn).view(torch.uint8)

    def scales(*size):
        return torch.exp2(torch.randint(-3, 4, size, generator=g).float())

    # Integers and powers of two: every order of operations gives the same bits.
    weight, x = codes(E, c.w_rows, K), codes(tokens, K)
    w_scale, x_scale = scales(E, c.w_rows), scales(tokens)
    for expert in range(E):
        out = torch.full((tokens, n_out), torch.nan)
        for n in range(c.units_n):
            for group in range(2):
                sums = multiply(c, weight, expert, n, group, x)
                store(c, out, sums, expert, n, group, w_scale, x_scale)
        want = values(x) @ values(weight[expert]).T * w_scale[expert] * x_scale[:, None]
        if gated:
            want = want[:, :n_out] * want[:, n_out:]
        assert torch.equal(out, want)


def store(c, out, sums, expert, n, group, w_scale, x_scale):
    """`RowScales`, `TokenScales` and `finish`; the activation function is gate times up."""
    tokens = len(x_scale)
    thread = torch.arange(128)
    warp, lane = thread // 32, thread % 32
    f, quad = lane // 4, lane % 4
    first = first_column(c, n, group, warp)
    inside = first < c.n_out
    for i in range(tokens // 8):
        y = torch.zeros(2, 4, 128)
        for block in range(2):
            for j in range(4):
                row = weight_row(c, first, block, j // 2, f)
                by = w_scale[expert, torch.where(inside, row, 0)].masked_fill(~inside, 0.0)
                y[block, j] = sums[block, :, i * 4 + j] * by * x_scale[i * 8 + quad * 2 + j % 2]
        if c.gated:
            y[0] = y[0] * y[1]
        words = [
            transpose_matrix(torch.stack([y[j // 2, j % 2 * 2], y[j // 2, j % 2 * 2 + 1]], -1))
            for j in range(2 if c.gated else 4)
        ]
        # A thread's columns are side by side: two of each word.
        row_of = torch.cat(words, -1).view(128, -1)
        columns = first + quad * row_of.shape[1]
        for t in range(128):
            if columns[t] < c.n_out:
                at = int(columns[t])
                out[i * 8 + int(f[t]), at : at + row_of.shape[1]] = row_of[t]


@pytest.mark.parametrize(
    ("gated", "n_out", "groups"),
    [(True, 128, 0), (True, 144, 1), (True, 768, 0), (True, 336, 5),
     (False, 256, 0), (False, 2880, 2), (False, 7168, 0), (False, 352, 3)],
)  # fmt: skip
def test_the_last_unit_loads_only_groups_with_rows_of_its_expert(gated, n_out, groups):
    assert config(gated, n_out, 128).tail_groups == groups


def test_a_tensor_map_has_the_dimensions_of_the_view_inner_first(monkeypatch):
    calls = []

    class Driver:
        def cuTensorMapEncodeTiled(self, *arguments):  # noqa: N802
            calls.append(arguments)
            return 0

    monkeypatch.setattr(cuda_driver, "_driver", Driver)
    rows = torch.zeros(64, 48, dtype=torch.uint8)
    tensor_map(rows_by_block(rows, gated=False), box=(8, 2, 4, 2, 128))
    tensor_map(rows, box=(16, 128))
    (_, _, rank, at, sizes, strides, box, steps, *_), (_, _, *plain, _, _, _, _) = calls
    assert (rank, at.value) == (5, rows.data_ptr())
    assert list(sizes) == [48, 2, 4, 4, 2]
    assert list(strides) == [48, 48 * 8, 48 * 2, 48 * 32]
    assert list(box) == [128, 2, 4, 2, 8]
    assert list(steps) == [1] * 5
    assert plain[0] == 2
    assert [list(part) for part in plain[2:]] == [[48, 64], [48], [128, 16], [1, 1]]


def test_a_tensor_map_of_words_has_strides_in_bytes_and_is_not_permuted(monkeypatch):
    calls = []

    class Driver:
        def cuTensorMapEncodeTiled(self, *arguments):  # noqa: N802
            calls.append(arguments)
            return 0

    monkeypatch.setattr(cuda_driver, "_driver", Driver)
    tensor_map(torch.zeros(6, 64, dtype=torch.int64), box=(1, 256))
    tensor_map(torch.zeros(6, 64, dtype=torch.uint8), box=(1, 64))
    (_, kind, _, _, sizes, strides, box, _, _, swizzle, *_), (_, plain, *_, permuted, _, _) = calls
    # cuda.h: CU_TENSOR_MAP_DATA_TYPE_UINT8 and INT64, CU_TENSOR_MAP_SWIZZLE_NONE and 128B.
    assert (kind, plain, swizzle, permuted) == (5, 0, 0, 3)
    assert [list(part) for part in (sizes, strides, box)] == [[64, 6], [512], [256, 1]]


# What the functions use; a load prints where it goes, its groups, coordinates and bytes expected.
STUBS = """
#include <cstdio>
#define __device__
#define __forceinline__ inline
typedef unsigned u32;
struct { int x; } threadIdx;
struct Unit { int expert, row, rows, n; bool alone, shared; };
struct TensorMap { int groups; };
u32 expected;
inline int __shfl_sync(u32, int x, int) { return x; }
inline int class_of(int) { return 0; }
inline int rows_of(int) { return ROWS; }
inline void barrier_expect(u32, u32 bytes) { expected = bytes; }
inline void load_5d(u32 to, const TensorMap* map, int c0, int c1, int c2, int c3, int c4, u32) {
  std::printf("%u %d %d %d %d %d %d %u\\n", to, map->groups, c4, c3, c2, c1, c0, expected);
}
#define load_5d_streaming load_5d
#define load_5d_pair load_5d
"""
MAIN = """
int main() {
  TensorMap whole{GROUPS}, tail{TAIL_GROUPS};
  Loads loads{&whole, &tail};
  for (int expert = 0; expert < EXPERTS; ++expert)
    for (int n = 0; n < UNITS_N; ++n) {
      const Unit unit{expert, 0, ROWS, n, false, PAIR > 1};
      for (int rank = 0; rank < PAIR; ++rank) loads.load_weights(unit, 1, 0, 0, rank, 0);
      for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x) {
        const int first = first_column(unit);
        std::printf("%d", first);
        for (int i = 0; i < 4; ++i) std::printf(" %d", weight_row(first, i / 2, i % 2));
        std::puts("");
      }
    }
}
"""


def function(source, name, *, indent=""):
    """The text of a function of the source."""
    start = rf"^{indent}__device__ __forceinline__ \w+ {name}\("
    (text,) = re.findall(rf"({start}.*?\n{indent}}}\n)", source, re.DOTALL | re.MULTILINE)
    return text


def host_program(config):
    source = config.source()
    sizes = re.findall(
        r"^constexpr (?:int GROUPS|u32 GROUP_BYTES|u32 BLOCK_BYTES).*$", source, re.M
    )
    assert len(sizes) == 3
    macros = {**config.defines(), "EXPERTS": E}
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in macros.items()),
            STUBS,
            *sizes,
            "constexpr u32 OFF_W = 0;",
            function(source, "first_column"),
            function(source, "weight_row"),
            "struct Loads {\n  const TensorMap *w_map, *w_tail_map;",
            function(source, "load_weights", indent="  "),
            "};",
            MAIN,
        ]
    )


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("pair", [False, True])
@every_shape
def test_the_formulas_here_are_those_of_the_kernel(tmp_path, gated, n_out, K, pair):
    """Its functions, compiled for a CPU, print boxes, and the rows of every thread."""
    c = Fp8ChannelGemmConfig(
        act="silu" if gated else None, gated=gated, rows=96, pair=pair, K=K, n_out=n_out
    )
    program, source = tmp_path / "program", tmp_path / "program.cpp"
    source.write_text(host_program(c))
    subprocess.run([COMPILER, "-std=c++17", source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    want = []
    for expert in range(E):
        for n in range(c.units_n):
            for block in range(2):
                groups, start = box_of(c, expert, n, block, 1)
                want.append((block * 16384, groups, *start, groups * 4096 + c.rows * 128))
            for thread in range(256):
                first = first_column(c, n, thread // 128, thread // 32 % 4)
                f = thread % 32 // 4
                held = [weight_row(c, first, i // 2, i % 2, f) for i in range(4)]
                want.append((first, *held))
    assert found == want


def tensor_core_sum(products, promoted):
    """Sums of [..., K] as Hopper's tensor cores make them, moved to float32 every `promoted`.

    An instruction adds 32 products to a sum: each is cut below 2**-13 of the largest's power of 2.
    """
    total = torch.zeros(products.shape[:-1], dtype=torch.float64)
    for part in products.double().split(promoted, -1):
        d = torch.zeros_like(total)
        for step in part.split(32, -1):
            addends = torch.cat([step, d[..., None]], -1)
            unit = torch.exp2(torch.frexp(addends.abs().amax(-1))[1] - 14.0)[..., None]
            d = ((addends / unit).trunc() * unit).sum(-1)
        total += d
    return total


def test_promoted_sums_are_as_exact_as_the_bounds_on_a_gpu_suppose():
    """tests/runtime/test_sm90.py supposes a relative error of at most 1e-3, or 2e-3, of sums."""
    g = torch.Generator().manual_seed(0)

    def codes():
        x = torch.randn(200, 7168, generator=g)
        return (x / x.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn).double()

    products = codes() * codes()
    exact = products.sum(-1)

    def error(promoted):
        off = tensor_core_sum(products, promoted) - exact
        return float(off.norm() / exact.norm())

    assert error(128) < 1.35e-4  # 1.3e-4, as docs/kernels.md says; the bounds suppose 1e-3
    # Where sums are not promoted, in tiles of many rows: as docs/kernels.md says.
    assert 4 * error(128) < error(7168) < 2.05e-3
