// Grouped GEMM of FP8 rows with INT4 weights in groups of 128, or with MXFP4 weights, for SM90.
//
//   y[r, n] = x_scale[r] * sum over k of  w_scale[e, n, k / 128] * x[r, k] * w[e, n, k]
//
// for the rows r of expert e. w is E4M3: an INT4 code, or an MXFP4 code times the power of two by which the scale of
// its 32 columns differs from w_scale, which is one for all k then. The tensor cores sum the products of 128 k, and these
// sums are added up in float32, times their scale; in units of more than 64 rows with MXFP4 the tensor cores sum over all
// k (mxfp4_layout.py has the error). A bias is added behind. ACTIVATED: out is an activation function of y; GATED: n runs
// over gate and up rows, and it is act(gate) * up. Out is bfloat16.
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
#include "sm90/panel_codes.cuh"
#if MXFP4
#include "sm90_w4a8/mxfp4.cuh"
#else
#include "sm90_w4a8/int4.cuh"
#endif
#include "sm90_w4a8/stages.cuh"

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

// d = 64 weight rows x ACC * 2 tokens over 128 k; returns the scales of d.
template <int ACC>
__device__ __forceinline__ float2 start(float (&d)[ACC], u32 (&a)[16], const Packed& packed, u64 x) {
#pragma unroll
  for (int step = 0; step < 4; ++step) packed.decode(a, step);
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma(d, a + step * 4, x + 2 * step, step > 0);
  wgmma_commit();
  return packed.scales();
}

// The sums of a unit of at most 64 rows: the second block is decoded while the first is multiplied.
template <int ACC>
__device__ __forceinline__ void multiply_small(float (&sum)[2][ACC], Worker& at, const Stages& stages) {
  Ring& ring = at.ring;
  float d[2][ACC];
  u32 a[2][16];
  float2 by[2];
  Packed packed[2];
  auto await_stage = [&]() {
    stages.await(ring);
    packed[0].load(stages.panel(ring.stage), 0);
    packed[1].load(stages.panel(ring.stage), 1);
  };
  if (at.k_begin < at.k_end) await_stage();  // a part of a short K may be empty
  for (int k = at.k_begin; k < at.k_end; ++k) {
    const u32 s = ring.stage;
    const u64 x = descriptor(stages.x(s));
    by[0] = start(d[0], a[0], packed[0], x);
    by[1] = start(d[1], a[1], packed[1], x);
    ring.next();
    if (k + 1 < at.k_end) await_stage();
    wgmma_wait<1>();
    promote(sum[0], d[0], by[0]);
    wgmma_wait<0>();
    release(at.base + OFF_EMPTY + s * 8);
    promote(sum[1], d[1], by[1]);
  }
}

#if MXFP4
// The sums of a unit of more than 64 rows. All columns of a weight row have one scale, so the tensor cores add up all
// products, and what would be registers for those of 128 columns is room for larger tiles. A step of 32 columns is
// decoded when the step that had its registers four before is done, and the first steps of a stage before the stage in
// front ends.
template <int ACC>
__device__ __forceinline__ void multiply_large(float (&sum)[2][ACC], Worker& at, const Stages& stages) {
  constexpr int AHEAD_OF_STAGE = 3;
  Ring& ring = at.ring;
  u32 a[16];
  float2 by[2];
  Packed packed;
  auto load = [&](int block) {
    packed.load(stages.panel(ring.stage), block);
    by[block] = packed.scales();
  };
  auto decode = [&](int step) {
    packed.pin(step);
    packed.decode(a, step);
  };
  stages.await(ring);
  load(0);
#pragma unroll
  for (int step = 0; step < AHEAD_OF_STAGE; ++step) decode(step);
  for (int k = 0; k < KBLOCKS; ++k) {
    const u32 s = ring.stage;
    const u64 x = descriptor(stages.x(s));
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if (block == 1) load(1);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (block == 1 || step >= AHEAD_OF_STAGE) {
          wgmma_wait<3>();
          decode(step);
        }
        wgmma_fence();
        wgmma(sum[block], a + step * 4, x + 2 * step, 1);
        wgmma_commit();
      }
    }
    ring.next();
    if (k + 1 < KBLOCKS) {
      stages.await(ring);
      load(0);
    }
    wgmma_wait<3>();
    decode(0);
    wgmma_wait<2>();
    decode(1);
    wgmma_wait<1>();
    decode(2);
    wgmma_wait<0>();
    release(at.base + OFF_EMPTY + s * 8);
  }
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    pin(sum[block]);
#pragma unroll
    for (int i = 0; i < ACC; ++i) sum[block][i] *= i & 2 ? by[block].y : by[block].x;
  }
}
#else
// The sums of a unit of more than 64 rows, for which a warpgroup has registers for one product. The other warpgroup
// multiplies meanwhile.
template <int ACC>
__device__ __forceinline__ void multiply_large(float (&sum)[2][ACC], Worker& at, const Stages& stages) {
  Ring& ring = at.ring;
  float d[ACC];
  u32 a[16];
  Packed packed;
  auto await_stage = [&]() {
    stages.await(ring);
    packed.load(stages.panel(ring.stage), 0);
  };
  await_stage();
  for (int k = 0; k < KBLOCKS; ++k) {
    const u32 s = ring.stage;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const float2 by = start(d, a, packed, descriptor(stages.x(s)));
      if (block == 0) {
        packed.load(stages.panel(s), 1);
      } else {
        ring.next();
        if (k + 1 < KBLOCKS) await_stage();
      }
      wgmma_wait<0>();
      if (block == 1) release(at.base + OFF_EMPTY + s * 8);
      promote(sum[block], d, by);
    }
  }
}
#endif

// A unit of at most N rows: its sums, then its part of the output.
template <int N>
__device__ __forceinline__ void run_unit(const Unit& unit, Worker& at, const float* x_scale, const int* pair_of_row, const Output& out) {
  constexpr int ACC = N / 2;
  const int lane = threadIdx.x & 31, group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  TokenScales<N> scales;
  scales.load(x_scale, pair_of_row, unit, lane);
  float sum[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;
  const Stages stages{at, group};
  if constexpr (N <= 64) multiply_small(sum, at, stages);
  else multiply_large(sum, at, stages);
  if (add_splits<N>(sum, at)) finish<N>(sum, scales, unit, out);
}

#include "sm90/pipeline.cuh"

#define KERNEL sm90_w4a8_grouped_gemm
#include "sm90_w4a8/family.cuh"
