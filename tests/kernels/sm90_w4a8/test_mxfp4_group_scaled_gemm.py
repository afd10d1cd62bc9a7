"""What the kernel computes of weights whose scales are far apart: its own code, run on a CPU.

Tensor cores are emulated, as exact sums of the products of an instruction.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.sm90.grouped_gemm import ACT_FNS
from moequant.kernels.sm90_w4a8.mxfp4_group_scaled_layout import pack
from moequant.kernels.sm90_w4a8.sm90_w4a8_fused import (
    Mxfp4GroupScaledGemmConfig,
    Mxfp4GroupScaledTilings,
)

COMPILER = shutil.which("g++")
ROWS, K, TOKENS = 128, 256, 8
H, I, T = 2880, 1536, 8


def config(**fields):
    common = {"act": None, "rows": 8, "K": K, "n_out": ROWS, "format": "mxfp4"}
    return Mxfp4GroupScaledGemmConfig(**common | fields)


# What the code of the kernel uses, as far as threads do not need each other. PRMT: PTX ISA.
STUBS = """
#include <cstdio>
#include <cstring>
#define __device__
#define __constant__
#define __forceinline__ inline
typedef unsigned char u8;
typedef unsigned u32;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
struct { int x; } threadIdx;
inline float __uint_as_float(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
template <int ACC> void pin(float (&)[ACC]) {}
inline u32 select_bytes(uint2 table, u32 selector) {
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 index = selector >> 4 * i & 7;
    out |= ((index < 4 ? table.x : table.y) >> index % 4 * 8 & 255) << 8 * i;
  }
  return out;
}
constexpr u32 CODE_BYTES = 8192;
template <int N> struct TokenScales {
  float of[N];
  float2 get(int eight, int quad) const {
    return {of[eight * 8 + quad * 2] * CODE_UNIT, of[eight * 8 + quad * 2 + 1] * CODE_UNIT};
  }
};
"""
# Without an argument, the operand of each thread, block, panel and step; with one, the sums of the
# products that come behind the panels.
MAIN = """
constexpr int PANELS_OF_K = K / 128;
alignas(16) u8 panels[PANELS_OF_K][PANEL_BYTES];
TokenScales<8> tokens;
int main(int count, char**) {
  std::fread(panels, 1, sizeof(panels), stdin);
  std::fread(&tokens, 1, sizeof(tokens), stdin);
  for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x)
    for (int block = 0; block < 2; ++block) {
      float sum[4] = {};
      for (int k = 0; k < PANELS_OF_K; ++k) {
        GroupScaled weights;
        weights.load(panels[k], block);
        for (int step = 0; step < 4; ++step) {
          if (count == 1) {
            u32 a[16];
            weights.decode(a, step);
            std::fwrite(a + step * 4, 4, 4, stdout);
          } else {
            float d[4];
            std::fread(d, 4, 4, stdin);
            promote<8>(sum, d, tokens, weights.scales(step));
          }
        }
      }
      if (count > 1) std::fwrite(sum, 4, 4, stdout);
    }
}
"""


def part(source, start, end):
    """The text of the source from `start` to in front of `end`."""
    (text,) = re.findall(rf"^{start}.*?(?=^{end})", source, re.DOTALL | re.MULTILINE)
    return text


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """kernel(*tensors, promote=...): what the program writes, float32 or bytes."""
    if COMPILER is None:
        pytest.skip("needs g++")
    source = config().source()
    panel = part(source, "// The 64 codes that a thread of", r"constexpr u32 W_BYTES")
    of_gpu = part(panel, r"__device__ __forceinline__ u32 select_bytes", "// Powers")
    unit = part(panel, "constexpr float CODE_UNIT", "__device__")
    code = [
        *(f"#define {name} {value}" for name, value in config().defines().items()),
        unit,
        STUBS,
        panel.replace(of_gpu, "").replace(unit, ""),
        part(source, r"template <int N>\n__device__ __forceinline__ void promote", "// The sums"),
        MAIN,
    ]
    folder = tmp_path_factory.mktemp("program")
    program, file = folder / "program", folder / "program.cpp"
    file.write_text("\n".join(code))
    subprocess.run([COMPILER, "-std=c++17", "-Wno-unused-result", file, "-o", program], check=True)

    def run(*tensors, promote):
        done = subprocess.run(
            [program, *["promote"] * promote],
            input=b"".join(bytes(t.flatten().view(torch.uint8).tolist()) for t in tensors),
            capture_output=True,
            check=True,
        )
        return torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8)

    return run


def multiply(kernel, held_rows, weight, x, x_scale):
    """[ROWS, TOKENS] float32: the sums of a unit of codes x [TOKENS, K], times `x_scale`."""
    panels = pack({"down": weight})[0, 0]
    thread = torch.arange(128)
    warp, f, quad = thread // 32, thread % 32 // 4, thread % 4
    # [thread, block, k, step, register, byte]; test_int4_layout has where WGMMA has a register's.
    a = kernel(panels, x_scale, promote=False).view(torch.float8_e4m3fn).double()
    a = a.view(128, 2, K // 128, 4, 4, 4)
    w = torch.zeros(2, K // 128, 4, 64, 32, dtype=torch.float64)
    for register in range(4):
        row = 16 * warp + f + 8 * (register % 2)
        for byte in range(4):
            column = 16 * (register // 2) + 4 * quad + byte
            w[:, :, :, row, column] = a[:, :, :, :, register, byte].permute(1, 2, 3, 0)
    d = w @ x.view(TOKENS, K // 128, 4, 32).permute(1, 2, 3, 0)
    i = torch.arange(4)
    row = (16 * warp + f)[:, None] + 8 * (i // 2)
    of_threads = d[..., row, quad[:, None] * 2 + i % 2].permute(3, 0, 1, 2, 4).float()
    assert torch.equal(of_threads.double().sum(), d.sum())  # float32 holds them
    sums = kernel(panels, x_scale, of_threads, promote=True).view(torch.float32).view(128, 2, 2, 2)
    out = torch.full((ROWS, TOKENS), torch.nan)
    for t, block, half, _, weight_row in held_rows(gated=False):
        out[weight_row, t % 4 * 2 : t % 4 * 2 + 2] = sums[t, block, half]
    return out


def weight(octaves, seed=0):
    """Codes and scales [1, ROWS, ...] that are `octaves` apart in every row."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (1, ROWS, K // 2), dtype=torch.uint8, generator=g)
    low = (254 - octaves) // 2
    scale = torch.randint(low, low + octaves + 1, (1, ROWS, K // 32), generator=g)
    scale[..., 2], scale[..., 5] = low, low + octaves
    return codes, scale.to(torch.uint8).view(torch.float8_e8m0fnu)


def integers(g, *size):
    """E4M3 codes whose sums of products float32 holds."""
    return torch.randint(-8, 9, size, generator=g).double()


def dequantized(codes, scale):
    """[ROWS, K] float64; NaN of a scale of NaN."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    numbers = torch.cat([numbers, -numbers])
    pairs = torch.stack([codes[0] & 15, codes[0] >> 4], -1).flatten(-2).long()
    return numbers[pairs] * scale[0].double().repeat_interleave(32, -1)


@pytest.mark.parametrize("octaves", [12, 60, 254])
def test_a_group_counts_whatever_the_scales_beside_it(kernel, held_rows, octaves):
    """Bit by bit: token t has numbers in group t alone, so that only float32's ends round.

    Sums of at most 32 * 8 * 6 times 2**127 are finite where the token's scale is 2**-14, which
    would be too late if it were applied behind.
    """
    g = torch.Generator().manual_seed(1)
    codes, scale = weight(octaves)
    x = torch.zeros(TOKENS, K, dtype=torch.float64)
    for token in range(TOKENS):
        x[token, token * 32 : token * 32 + 32] = integers(g, 32)
    x_scale = torch.exp2(torch.tensor([-20.0, 0, -20, 3, -14, -20, -9, -30]))
    got = multiply(kernel, held_rows, (codes, scale), x, x_scale)
    want = dequantized(codes, scale) @ (x * x_scale[:, None].double()).T
    assert torch.equal(got, want.float())
    assert bool(got[:, x_scale <= 2.0**-14].isfinite().all())
    assert bool((got != 0).any(0).all())


@pytest.mark.parametrize("octaves", [12, 60, 250])
def test_sums_over_groups_are_rounded_as_float32_sums(kernel, held_rows, octaves):
    g = torch.Generator().manual_seed(2)
    codes, scale = weight(octaves)
    x, x_scale = integers(g, TOKENS, K), torch.rand(TOKENS, generator=g) * 2.0**-16
    got = multiply(kernel, held_rows, (codes, scale), x, x_scale)
    x = x * x_scale[:, None].double()
    groups = torch.stack([
        w @ of_x.T
        for w, of_x in zip(dequantized(codes, scale).split(32, 1), x.split(32, 1), strict=True)
    ])  # fmt: skip
    # A rounding for the token's scale, and one for each of 8 sums; subnormals are 2**-149 apart.
    most = 9 * 2.0**-24 * groups.abs().sum(0) + 9 * 2.0**-150
    assert bool(((got.double() - groups.sum(0)).abs() <= most).all())


def test_groups_of_zeros_and_of_nan(kernel, held_rows):
    """A group of zeros adds nothing under any scale but NaN, which makes its whole row NaN."""
    g = torch.Generator().manual_seed(3)
    codes, scale = weight(40)
    codes[..., 16:32], codes[..., 48:64] = 0, 0x88
    scale = scale.view(torch.uint8)
    scale[..., 1], scale[..., 3] = 254, 0
    scale[0, 5, 1], scale[0, 9, 4] = 255, 255
    scale = scale.view(torch.float8_e8m0fnu)
    x, x_scale = integers(g, TOKENS, K), torch.full((TOKENS,), 2.0**-9)
    got = multiply(kernel, held_rows, (codes, scale), x, x_scale)
    assert got.isnan().any(1).nonzero().flatten().tolist() == [5, 9]
    assert bool(got[[5, 9]].isnan().all())
    others = [row for row in range(ROWS) if row not in (5, 9)]
    used = dequantized(codes, scale)[others]
    assert not used[:, 32:64].any()
    want = used @ (x * 2.0**-9).T
    most = 8 * 2.0**-24 * (used.abs() @ x.abs().T) * 2.0**-9
    assert bool(((got[others].double() - want).abs() <= most).all())


def test_scales_beyond_float32_are_infinite_as_the_weights_are(kernel, held_rows):
    codes = torch.full((1, ROWS, K // 2), 0x44, dtype=torch.uint8)  # 2
    scale = torch.full((1, ROWS, K // 32), 254, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    x = torch.zeros(TOKENS, K, dtype=torch.float64)
    x[:, 0] = torch.tensor([1, -1, 0, 2, 1, 1, 1, 1])
    x_scale = torch.tensor([1.0, 1, 1, 1, 0.5, 0.25, 2.0**-120, 2])
    got = multiply(kernel, held_rows, (codes, scale), x, x_scale)
    inf = torch.inf
    assert got[0].tolist() == [inf, -inf, 0, inf, 2.0**127, 2.0**126, 2.0**8, inf]
    assert torch.equal(got, got[:1].expand(ROWS, TOKENS))


def every_tiling():
    """The GEMMs of every tile, split, paired and gathered.

    But split in two: the warps that load have a few bytes of stack then, as in sm90_w4a8.
    """
    family = Mxfp4GroupScaledTilings()
    for rows in family.rows:
        splits = (1, 4) if rows <= 32 else (1,)
        pairs = (False, True) if rows in family.pair_rows else (False,)
        gathers = (0, T) if rows in family.gather_rows else (0,)
        for split, pair, gather in product(splits, pairs, gathers):
            both = {"rows": rows, "split": split, "pair": pair}
            yield config(
                act="silu", gated=True, gather=gather, routed=rows == 8, K=H, n_out=I, **both
            )
            yield config(K=I, n_out=H, **both)


def every_epilogue():
    """With most registers: the largest tiles, gathered."""
    for act, gated in product(ACT_FNS, (True, False)):
        both = {"rows": 96, "pair": True, "gather": T, "limited": True, "bias": True}
        yield config(act=act, gated=gated, K=H, n_out=I, **both)


EVERY = list(dict.fromkeys([*every_tiling(), *every_epilogue()]))


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param([EVERY[0], EVERY[-1]], id="few"),
        pytest.param(EVERY, id="every", marks=pytest.mark.full),
    ],
)
def test_kernels_compile_without_spills_and_their_products_overlap(compiles_well, configs):
    compiles_well(configs)
