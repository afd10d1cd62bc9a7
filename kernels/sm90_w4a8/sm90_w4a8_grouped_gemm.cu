// Grouped GEMM of FP8 rows with INT4 weights in groups of 128, for SM90.
//
//   y[r, n] = x_scale[r] * sum over k of  w_scale[e, n, k / 128] * x[r, k] * w[e, n, k]
//
// for the rows r of expert e. The tensor cores sum the products of 128 k, which are added up in float32, times
// their scale. A bias is added behind. ACTIVATED: out is an activation function of y; GATED: n runs over gate and
// up rows, and it is act(gate) * up. Out is bfloat16.
//
// Weights are the M of WGMMA and come from registers, tokens are its N, a multiple of 8: a thread reads its packed
// codes by two 16-byte loads a block of 64 weight rows x 128 k, and decodes four of them to E4M3 by three
// instructions. layout.py says how codes and scales lie in a panel of 128 weight rows x 128 k.
//
// pipeline.cuh has the loop over units of work, schedule.cuh what CTAs and warps share. Each of two warpgroups
// multiplies by a panel of a stage: its two blocks are gate and up of the same columns if GATED. The N of the
// instruction is the smallest class of the tile's rows.
//
// Compile-time, beside the classes and what schedule.cuh has: ACTIVATED, GATED, ACT, LIMITED, BIAS, N_OUT (columns of
// out), W_ROWS (weight rows an expert).

#include "sm90/ptx.cuh"

constexpr int SCALE_WARPS = 0;
constexpr int MATH_REGISTERS = GATHER > 0 ? 224 : 232, OTHER_REGISTERS = GATHER > 0 ? 56 : 40;  // of a thread
constexpr int PANELS = (N_OUT + (GATED ? 63 : 127)) / (GATED ? 64 : 128);  // of an expert, the last perhaps half full
constexpr u32 CODE_BYTES = 8192, PANEL_BYTES = CODE_BYTES + 256;
constexpr u32 W_BYTES = 2 * PANEL_BYTES;
constexpr u32 X_BYTES = ROWS * 128;
constexpr u32 OFF_X = 0;
constexpr u32 OFF_W = STAGES * X_BYTES;
constexpr u32 OFF_FULL = OFF_W + STAGES * W_BYTES;
constexpr u32 SCRATCH_BYTES = 0;
constexpr float CODE_UNIT = 256.f;  // the E4M3 bits of a code stand for code / 256

//CLASSES

#include "sm90/schedule.cuh"
#include "sm90/activation.cuh"

// Four codes, one in the low half of each byte as 2 * code or, if negative, -2 * code - 1, to E4M3 of code / 256:
// the bits of an E4M3 magnitude are 512 times its value up to 16, so 2 * |code| are those bits.
__device__ __forceinline__ u32 decode_4(u32 codes) {
  return (codes & 0x0E0E0E0E) + (codes & 0x01010101) * 0x82;
}

// What a thread reads of a block of 64 weight rows x 128 k: 64 codes and the scales of its two rows.
struct Packed {
  uint4 codes[2];
  u32 scale;
  __device__ __forceinline__ void load(const u8* panel, int block) {
    const int thread = threadIdx.x & 127;
    codes[0] = *(const uint4*)(panel + block * (CODE_BYTES / 2) + thread * 16);
    codes[1] = *(const uint4*)(panel + block * (CODE_BYTES / 2) + 2048 + thread * 16);
    scale = *(const u32*)(panel + CODE_BYTES + thread / 4 * 8 + block * 4);
  }
  // To the A operands of four WGMMA, and the scales of rows lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ void decode(u32 (&a)[16], float2& by) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 words[4] = {codes[half].x, codes[half].y, codes[half].z, codes[half].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[half * 8 + i * 2] = decode_4(words[i]);
        a[half * 8 + i * 2 + 1] = decode_4(words[i] >> 4);
      }
    }
    by = {__uint_as_float(scale << 16), __uint_as_float(scale & 0xFFFF0000)};
  }
};

// d = 64 weight rows x ACC * 2 tokens over 128 k.
template <int ACC>
__device__ __forceinline__ void start(float (&d)[ACC], const u32 (&a)[16], u32 x) {
  const u64 b = descriptor(x);
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(d, a + k * 4, b + 2 * k, k > 0);
  wgmma_commit();
}
template <int ACC>
__device__ __forceinline__ void promote(float (&to)[ACC], float (&d)[ACC], float2 by) {
  pin(d);
#pragma unroll
  for (int i = 0; i < ACC; i += 4) {
    to[i] += by.x * d[i];
    to[i + 1] += by.x * d[i + 1];
    to[i + 2] += by.y * d[i + 2];
    to[i + 3] += by.y * d[i + 3];
  }
}

struct Output {
  u16* __restrict__ to;
  const float* __restrict__ bias;  // [E, W_ROWS]
  ActParameters act;
};

// Scales of the tokens of a unit: lane l has those of tokens l, l + 32 ..
template <int N>
struct TokenScales {
  static constexpr int COUNT = (N + 31) / 32;
  float of[COUNT];
  __device__ __forceinline__ void load(const float* x_scale, const int* slot_of_row, const Unit& unit, int lane) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = unit.row + min(i * 32 + lane, max(unit.rows - 1, 0));
#if GATHER
      of[i] = __ldcg(x_scale + __ldcg(slot_of_row + row) / GATHER);
#else
      of[i] = __ldcg(x_scale + row);
#endif
    }
  }
  // Those of the two tokens that a lane has of eight.
  __device__ __forceinline__ float2 get(int eight, int quad) const {
    const float x = of[eight / 4];
    const int lane = (eight & 3) * 8 + quad * 2;
    return {__shfl_sync(~0u, x, lane) * CODE_UNIT, __shfl_sync(~0u, x, lane + 1) * CODE_UNIT};
  }
};

// The part of the output of a unit of at most N rows. A thread has rows f = lane / 4 and f + 8 of a block, which
// layout.py chose such that what a thread writes of a token lies side by side.
template <int N>
__device__ __forceinline__ void finish(float (&sum)[2][N / 2], const TokenScales<N>& scales, const Unit& unit, const Output& out) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4, quad = lane & 3, f = lane / 4;
  const int n = GATED ? unit.n * 128 + group * 64 + (warp & 3) * 16 : unit.n * 256 + group * 128 + (warp & 3) * 32;
  const int column = n + quad * (GATED ? 4 : 8);
#if BIAS
  float bias[2][2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = GATED ? b * N_OUT + n + f / 2 * 4 + half * 2 + (f & 1) : n + f / 2 * 8 + b * 4 + half * 2 + (f & 1);
      bias[b][half] = n < N_OUT ? __ldg(out.bias + (long long)unit.expert * W_ROWS + row) : 0.f;
    }
  }
#endif
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const float2 by = scales.get(i, quad);
    float y[2][4];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[b][j] = sum[b][i * 4 + j] * (j & 1 ? by.y : by.x);
#if BIAS
        y[b][j] += bias[b][j / 2];
#endif
      }
    }
#if ACTIVATED
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[0][j] = activate(y[0][j], GATED ? y[1][j] : 0.f, out.act);
      if (!GATED) y[1][j] = activate(y[1][j], 0.f, out.act);
    }
#endif
    u32 words[4];
#pragma unroll
    for (int j = 0; j < (GATED ? 2 : 4); ++j) {
      words[j] = pack_bf16(y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
      asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(words[j]));
    }
    const int token = i * 8 + f;
    if (token < unit.rows && column < N_OUT) {
      u16* to = out.to + (long long)(unit.row + token) * N_OUT + column;
      if (GATED) *(uint2*)to = make_uint2(words[0], words[1]);
      else *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// A unit of at most N rows: its sums, then its part of the output.
template <int N>
__device__ __forceinline__ void run_unit(const Unit& unit, Worker& at, const float* x_scale, const int* slot_of_row, const Output& out) {
  constexpr int ACC = N / 2;
  const u32 base = at.base;
  const int k_end = at.k_end;
  Ring& ring = at.ring;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4;
  TokenScales<N> scales;
  scales.load(x_scale, slot_of_row, unit, lane);
  float sum[2][ACC], d[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;
  u32 a[2][16];
  float2 by[2];
  Packed packed;
  auto load = [&](int block) { packed.load(at.smem + OFF_W + ring.stage * W_BYTES + group * PANEL_BYTES, block); };
  auto await_stage = [&]() {
    barrier_wait(base + OFF_FULL + ring.stage * 8, ring.parity);
    see_copies();
    load(0);
  };
  if (at.k_begin < k_end) await_stage();  // a part of a short K may be empty
  for (int k = at.k_begin; k < k_end; ++k) {
    const u32 s = ring.stage, x = base + OFF_X + s * X_BYTES;
    if constexpr (N <= 64) {
      // The second block is decoded while the first is multiplied.
      packed.decode(a[0], by[0]);
      load(1);
      start(d[0], a[0], x);
      packed.decode(a[1], by[1]);
      start(d[1], a[1], x);
      ring.next();
      if (k + 1 < k_end) await_stage();
      wgmma_wait<1>();
      promote(sum[0], d[0], by[0]);
      wgmma_wait<0>();
      release(base + OFF_EMPTY + s * 8, lane);
      promote(sum[1], d[1], by[1]);
    } else {  // registers for one product; the other warpgroup multiplies meanwhile
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        packed.decode(a[0], by[b]);
        start(d[0], a[0], x);
        if (b == 0) {
          load(1);
        } else {
          ring.next();
          if (k + 1 < k_end) await_stage();
        }
        wgmma_wait<0>();
        if (b == 1) release(base + OFF_EMPTY + s * 8, lane);
        promote(sum[b], d[0], by[b]);
      }
    }
  }

  if (add_splits<N>(sum, at)) finish<N>(sum, scales, unit, out);
}

#include "sm90/pipeline.cuh"

struct W4a8 {
  const u8* w;
  const XMaps& x_maps;
  const float* x_scale;
  const int* slot_of_row;
  Output out;

  __device__ __forceinline__ const TensorMap* x_map(const Unit& unit) const { return &x_maps.of[class_of(unit.rows)]; }
  __device__ __forceinline__ void load_weights(const Unit& unit, int k, u32 base, u32 s, int rank, u32 bar) const {
    const bool second = unit.n * 2 + 1 < PANELS;
    const u32 x_rows = GATHER ? 0 : rows_of(class_of(unit.rows));
    barrier_expect(bar, (second ? W_BYTES : PANEL_BYTES) + x_rows * 128);
    const u8* from = w + (((long long)unit.expert * PANELS + unit.n * 2) * KBLOCKS + k) * PANEL_BYTES;
    const u32 to = base + OFF_W + s * W_BYTES;
    constexpr long long NEXT = (long long)KBLOCKS * PANEL_BYTES;
#if PAIR > 1
    if (unit.shared) {
      if (second || rank == 0) load_bulk_pair(to + rank * PANEL_BYTES, from + rank * NEXT, PANEL_BYTES, bar);
      return;
    }
#endif
    if (unit.alone) {
      load_bulk_streaming(to, from, PANEL_BYTES, bar);
      if (second) load_bulk_streaming(to + PANEL_BYTES, from + NEXT, PANEL_BYTES, bar);
    } else {
      load_bulk(to, from, PANEL_BYTES, bar);
      if (second) load_bulk(to + PANEL_BYTES, from + NEXT, PANEL_BYTES, bar);
    }
  }
  __device__ __forceinline__ void load_x(const Unit& unit, const TensorMap* map, int k, u32 base, u32 s, u32 bar) const {
    load_2d(base + OFF_X + s * X_BYTES, map, k * 128, unit.row, bar);
  }
  template <int N>
  __device__ __forceinline__ void run_unit(const Unit& unit, Worker& at) const {
    ::run_unit<N>(unit, at, x_scale, slot_of_row, out);
  }
  __device__ __forceinline__ void end(int) const {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sm90_w4a8_grouped_gemm(
    const int4* tiles, const int* tile_count, int* units_taken, const u8* x, const float* x_scale, const int* slot_of_row,
    u16* __restrict__ out, const float* __restrict__ bias, const ActParameters act, const __grid_constant__ Routing routing,
    const __grid_constant__ XMaps x_maps, const u8* __restrict__ w) {
  extern __shared__ __align__(1024) u8 smem[];
  W4a8 family{w, x_maps, x_scale, slot_of_row, {out, bias, act}};
  grouped_gemm(family, {tiles, tile_count, units_taken, x, slot_of_row}, routing, smem);
}
