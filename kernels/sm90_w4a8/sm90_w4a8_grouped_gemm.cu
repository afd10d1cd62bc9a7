// Grouped GEMM of FP8 rows with INT4 weights in groups of 128, or with MXFP4 weights, for SM90.
//
//   y[r, n] = x_scale[r] * sum over k of  w_scale[e, n, k / 128] * x[r, k] * w[e, n, k]
//
// for the rows r of expert e. w is E4M3: an INT4 code, or an MXFP4 code times the power of two by which the scale of
// its 32 columns differs from w_scale. The tensor cores sum the products of 128 k, which are added up in float32,
// times their scale. A bias is added behind. ACTIVATED: out is an activation function of y; GATED: n runs over gate
// and up rows, and it is act(gate) * up. Out is bfloat16.
//
// Weights are the M of WGMMA and come from registers, tokens are its N, a multiple of 8: a thread reads its packed
// codes by two 16-byte loads a block of 64 weight rows x 128 k, and decodes them to E4M3: int4.cuh, mxfp4.cuh.
//
// pipeline.cuh has the loop over units of work, schedule.cuh what CTAs and warps share, panels.cuh how weights come,
// bf16_output.cuh how results go. The N of the instruction is the smallest class of the tile's rows.
//
// Compile-time, beside the classes and what schedule.cuh has: ACTIVATED, GATED, ACT, LIMITED, BIAS, N_OUT (columns of
// out), W_ROWS (weight rows an expert), MXFP4.

#include "sm90/ptx.cuh"

constexpr int SCALE_WARPS = 0, X_PARTS = 1;
constexpr int MATH_REGISTERS = 232, OTHER_REGISTERS = 40;  // of a thread
constexpr int PANELS = (N_OUT + (GATED ? 63 : 127)) / (GATED ? 64 : 128);  // of an expert, the last perhaps half full
constexpr u32 CODE_BYTES = 8192;  // of a panel
#if MXFP4
#include "sm90_w4a8/mxfp4.cuh"
#else
#include "sm90_w4a8/int4.cuh"
#endif
constexpr u32 W_BYTES = 2 * PANEL_BYTES;
constexpr u32 X_BYTES = ROWS * 128;
constexpr u32 OFF_X = 0;
constexpr u32 OFF_W = STAGES * X_BYTES;
constexpr u32 OFF_FULL = OFF_W + STAGES * W_BYTES;
constexpr u32 SCRATCH_BYTES = 0;

//CLASSES

#include "sm90/schedule.cuh"
#include "sm90/activation.cuh"
#include "sm90/panels.cuh"
#include "sm90/token_scales.cuh"

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

// A unit of at most N rows: its sums, then its part of the output.
template <int N>
__device__ __forceinline__ void run_unit(const Unit& unit, Worker& at, const float* x_scale, const int* pair_of_row, const Output& out) {
  constexpr int ACC = N / 2;
  const u32 base = at.base;
  const int k_end = at.k_end;
  Ring& ring = at.ring;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4;
  TokenScales<N> scales;
  scales.load(x_scale, pair_of_row, unit, lane);
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
  const int* pair_of_row;
  Output out;

  __device__ __forceinline__ const TensorMap* x_map(const Unit& unit) const { return &x_maps.of[class_of(unit.rows)]; }
  __device__ __forceinline__ void load_weights(const Unit& unit, int k, u32 base, u32 s, int rank, u32 bar) const {
    load_panels(w, unit, k, base + OFF_W + s * W_BYTES, rank, bar);
  }
  __device__ __forceinline__ void load_x(const Unit& unit, const TensorMap* map, int k, u32 base, u32 s, u32 bar) const {
    load_2d(base + OFF_X + s * X_BYTES, map, k * 128, unit.row, bar);
  }
  template <int N>
  __device__ __forceinline__ void run_unit(const Unit& unit, Worker& at) const {
    ::run_unit<N>(unit, at, x_scale, pair_of_row, out);
  }
  __device__ __forceinline__ void end(int) const {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sm90_w4a8_grouped_gemm(
    const int4* tiles, const int* tile_count, int* units_taken, const u8* x, const float* x_scale, const int* pair_of_row,
    u16* __restrict__ out, const float* __restrict__ bias, const ActParameters act, const __grid_constant__ Routing routing,
    const __grid_constant__ XMaps x_maps, const u8* __restrict__ w) {
  extern __shared__ __align__(1024) u8 smem[];
  W4a8 family{w, x_maps, x_scale, pair_of_row, {out, bias, act}};
  grouped_gemm(family, {tiles, tile_count, units_taken, x, pair_of_row}, routing, smem);
}
