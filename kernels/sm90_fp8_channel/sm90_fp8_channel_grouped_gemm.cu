// Grouped GEMM of FP8 rows with FP8 weights that have one scale per weight row, or one per matrix, for SM90.
//
//   y[r, n] = x_scale[r] * w_scale[e, n] * sum over k of  x[r, k] * w[e, n, k]
//
// for the rows r of expert e. The tensor cores sum the products of 128 k; these sums are added up in float32, because
// the tensor cores' own sums have about 14 bits (sm90_fp8_channel_fused.py has the error). Units of more than 128 rows
// have no registers for that: there the tensor cores sum over all k. A bias is added behind.
// ACTIVATED: out is an activation function of y; GATED: n runs over gate and up rows, and it is act(gate) * up. Out is
// bfloat16.
//
// Weights are the M of WGMMA, tokens are its N, a multiple of 8; both are read from shared memory. TMA brings weight
// rows in the order of bf16_output.cuh: the tensor map has five dimensions, of which three are parts of the row.
//
// pipeline.cuh has the loop over units of work, schedule.cuh what CTAs and warps share, bf16_output.cuh how results go.
// The N of the instruction is the smallest class of the tile's rows.
//
// Compile-time, beside the classes and what schedule.cuh has: ACTIVATED, GATED, ACT, LIMITED, BIAS, N_OUT (columns of
// out), W_ROWS (weight rows an expert), PER_MATRIX (a scale per matrix instead of per row), TAIL_GROUPS (groups of rows
// that the last unit along n has; 0 if all of them).

#include "sm90/ptx.cuh"

constexpr int SCALE_WARPS = 0, X_PARTS = 1;
constexpr int MATH_REGISTERS = GATHER > 0 ? 224 : 232, OTHER_REGISTERS = GATHER > 0 ? 56 : 40;  // of a thread
constexpr float CODE_UNIT = 1.f;
constexpr int GROUPS = 8;  // of 16 rows of either block of a unit: of gate and of up, or of 32 weight rows
constexpr u32 GROUP_BYTES = 16 * 128;
constexpr u32 BLOCK_BYTES = GROUPS * GROUP_BYTES, W_BYTES = 2 * BLOCK_BYTES;
constexpr u32 X_BYTES = ROWS * 128;
constexpr u32 OFF_W = 0;
constexpr u32 OFF_X = STAGES * W_BYTES;
constexpr u32 OFF_FULL = OFF_X + STAGES * X_BYTES;
constexpr u32 SCRATCH_BYTES = 0;

//CLASSES

#include "sm90/schedule.cuh"
#include "sm90/activation.cuh"
#include "sm90/bf16_output.cuh"
#include "sm90/token_scales.cuh"

// d = 64 weight rows x ACC * 2 tokens over 128 k.
template <int ACC>
__device__ __forceinline__ void start(float (&d)[ACC], u32 w, u32 x) {
  const u64 a = descriptor(w), b = descriptor(x);
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(d, a + 2 * k, b + 2 * k, k > 0);
  wgmma_commit();
}
// The same, added to `sum` by the tensor cores.
template <int ACC>
__device__ __forceinline__ void multiply(float (&sum)[ACC], u32 w, u32 x) {
  const u64 a = descriptor(w), b = descriptor(x);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(sum, a + 2 * k, b + 2 * k, 1);
  wgmma_commit();
}
template <int ACC>
__device__ __forceinline__ void add(float (&to)[ACC], float (&d)[ACC]) {
  pin(d);
#pragma unroll
  for (int i = 0; i < ACC; ++i) to[i] += d[i];
}

// Scales of the two weight rows that a thread has of either block.
struct RowScales {
  float of[2][2];
  __device__ __forceinline__ RowScales(const float* w_scale, const Unit& unit) {
    const int n = first_column(unit);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        of[b][half] = PER_MATRIX ? __ldg(w_scale + unit.expert * (GATED ? 2 : 1) + (GATED ? b : 0))
                                 : of_weight_row(w_scale, unit, n, b, half);
      }
    }
  }
  template <int ACC>
  __device__ __forceinline__ void multiply(float (&sum)[2][ACC]) const {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < ACC; ++i) sum[b][i] *= of[b][i / 2 % 2];
    }
  }
};

// A unit of at most N rows: its sums, then its part of the output.
template <int N>
__device__ __forceinline__ void run_unit(
    const Unit& unit, Worker& at, const float* w_scale, const float* x_scale, const int* pair_of_row, const Output& out) {
  constexpr int ACC = N / 2;
  const u32 base = at.base;
  const int k_end = at.k_end;
  Ring& ring = at.ring;
  const int lane = threadIdx.x & 31, group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  TokenScales<N> token_scales;
  token_scales.load(x_scale, pair_of_row, unit, lane);
  const RowScales row_scales(w_scale, unit);
  float sum[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;
  auto await_stage = [&]() {
    barrier_wait(base + OFF_FULL + ring.stage * 8, ring.parity);
    see_copies();
  };
  // With more than 128 rows there are no registers for a product beside the sums. With one stage both are the same, and
  // ptxas 13.0 leaves out the products of the first block where the registers of one product serve both.
  constexpr bool IN_TENSOR_CORES = N > 128 || (N > 96 && KBLOCKS == 1);
  u32 before = 0;  // the stage
  for (int k = at.k_begin; k < k_end; ++k) {
    const u32 s = ring.stage, x = base + OFF_X + s * X_BYTES;
    const u32 w = base + OFF_W + s * W_BYTES + group * (BLOCK_BYTES / 2);
    if constexpr (N <= 96) {
      await_stage();  // not behind start(): ptxas would then wait for both products before the first sum
      float d[2][ACC];
      start(d[0], w, x);
      start(d[1], w + BLOCK_BYTES, x);
      ring.next();
      wgmma_wait<1>();
      add(sum[0], d[0]);
      wgmma_wait<0>();
      pin(d[1]);
      release(base + OFF_EMPTY + s * 8);
      add(sum[1], d[1]);
    } else if constexpr (!IN_TENSOR_CORES) {  // registers for one product; the other warpgroup multiplies meanwhile
      if (k == at.k_begin) await_stage();
      float d[ACC];
      start(d, w, x);
      wgmma_wait<0>();
      add(sum[0], d);
      start(d, w + BLOCK_BYTES, x);
      ring.next();
      if (k + 1 < k_end) await_stage();
      wgmma_wait<0>();
      release(base + OFF_EMPTY + s * 8);
      add(sum[1], d);
    } else {
      await_stage();
      multiply(sum[0], w, x);
      multiply(sum[1], w + BLOCK_BYTES, x);
      ring.next();
      wgmma_wait<2>();  // for the products of the stage in front
      if (k > at.k_begin) release(base + OFF_EMPTY + before * 8);
      before = s;
    }
  }
  if constexpr (IN_TENSOR_CORES) {
    wgmma_wait<0>();
    release(base + OFF_EMPTY + before * 8);
    pin(sum[0]);
    pin(sum[1]);
  }

  if (add_splits<N>(sum, at)) {
    row_scales.multiply(sum);
    finish<N>(sum, token_scales, unit, out);
  }
}

#include "sm90/pipeline.cuh"

struct Fp8Channel {
  const TensorMap *w_map, *w_tail_map;  // boxes of GROUPS and of TAIL_GROUPS groups of either block
  const XMaps& x_maps;
  const float* w_scale;
  const float* x_scale;
  const int* pair_of_row;
  Output out;

  __device__ __forceinline__ void load_weights(const Unit& unit, int k, u32 base, u32 s, int rank, u32 bar) const {
    const bool tail = TAIL_GROUPS > 0 && unit.n == UNITS_N - 1;
    const TensorMap* map = tail ? w_tail_map : w_map;
    const u32 x_rows = GATHER ? 0 : rows_of(class_of(unit.rows));
    barrier_expect(bar, (tail ? TAIL_GROUPS : GROUPS) * 2 * GROUP_BYTES + x_rows * 128);
    const u32 to = base + OFF_W + s * W_BYTES;
    // Blocks are rows of gate and of up, or, of every eight rows, the first and the last four.
    const int first = GATED ? (unit.expert * W_ROWS + unit.n * 128) / 16 : (unit.expert * W_ROWS + unit.n * 256) / 32;
    auto pair_of_rows = [](int block) { return GATED ? 0 : 2 * block; };
    auto group = [&](int block) { return GATED ? first + block * (N_OUT / 16) : first; };
#if PAIR > 1
    if (unit.shared) {
      load_5d_pair(to + rank * BLOCK_BYTES, map, k * 128, 0, 0, pair_of_rows(rank), group(rank), bar);
      return;
    }
#endif
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if (unit.alone) load_5d_streaming(to + block * BLOCK_BYTES, map, k * 128, 0, 0, pair_of_rows(block), group(block), bar);
      else load_5d(to + block * BLOCK_BYTES, map, k * 128, 0, 0, pair_of_rows(block), group(block), bar);
    }
  }
  __device__ __forceinline__ void load_x(const Unit& unit, const TensorMap* map, int k, u32 base, u32 s, u32 bar) const {
    load_2d(base + OFF_X + s * X_BYTES, map, k * 128, unit.row, bar);
  }
  template <int N>
  __device__ __forceinline__ void run_unit(const Unit& unit, Worker& at) const {
    ::run_unit<N>(unit, at, w_scale, x_scale, pair_of_row, out);
  }
  __device__ __forceinline__ void end(int) const {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sm90_fp8_channel_grouped_gemm(
    const int4* tiles, const int* tile_count, int* units_taken, const u8* x, const float* x_scale, const int* pair_of_row,
    u16* __restrict__ out, const float* __restrict__ bias, const ActParameters act, const __grid_constant__ Routing routing,
    const __grid_constant__ XMaps x_maps, const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap w_tail_map,
    const float* __restrict__ w_scale) {
  extern __shared__ __align__(1024) u8 smem[];
  Fp8Channel family{&w_map, &w_tail_map, x_maps, w_scale, x_scale, pair_of_row, {out, bias, act}};
  grouped_gemm(family, {tiles, tile_count, units_taken, x, pair_of_row}, routing, smem);
}
