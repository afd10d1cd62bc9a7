// Grouped GEMM of FP8 rows with MXFP4 weights whose E8M0 scales are too far apart to be folded into E4M3, for SM90.
//
//   y[r, n] = sum over groups g of  w_scale[e, n, g] * (x_scale[r] * sum over k of g of  x[r, k] * code[e, n, k])
//
// for the rows r of expert e. The tensor cores sum the products of a group of 32 k, which is one instruction. Such a sum
// is multiplied by its token's scale and added up times its group's, both in float32 and in this order: so it is as
// large as the products of dequantized weights and activations are, and overflows or underflows only where these do. A
// bias is added behind. Otherwise as sm90_w4a8_grouped_gemm.cu with MXFP4, which has the same stages and is faster.

#include "sm90/ptx.cuh"
#include "sm90/panel_codes.cuh"
#include "sm90_w4a8/mxfp4.cuh"
#include "sm90_w4a8/mxfp4_group_scaled.cuh"
#include "sm90_w4a8/stages.cuh"

// Add sums of a group, times the scales of tokens, then times those of the thread's two rows.
template <int N>
__device__ __forceinline__ void promote(float (&to)[N / 2], float (&d)[N / 2], const TokenScales<N>& tokens, float2 by) {
  const int quad = threadIdx.x & 3;
  pin(d);
#pragma unroll
  for (int i = 0; i < N / 2; i += 4) {
    const float2 x = tokens.get(i / 4, quad);
    to[i] += by.x * (d[i] * x.x);
    to[i + 1] += by.x * (d[i + 1] * x.y);
    to[i + 2] += by.y * (d[i + 2] * x.x);
    to[i + 3] += by.y * (d[i + 3] * x.y);
  }
}

// The sums of a unit of at most N rows, a product at a time. The other warpgroup multiplies meanwhile.
template <int N>
__device__ __forceinline__ void multiply(float (&sum)[2][N / 2], const TokenScales<N>& tokens, Worker& at, const Stages& stages) {
  Ring& ring = at.ring;
  float d[N / 2];
  u32 a[16];
  GroupScaled weights;
  for (int k = at.k_begin; k < at.k_end; ++k) {
    const u32 s = ring.stage;
    stages.await(ring);
    const u64 x = descriptor(stages.x(s));
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      weights.load(stages.panel(s), block);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        weights.decode(a, step);
        pin(d);
        wgmma_fence();
        wgmma(d, a + step * 4, x + 2 * step, false);
        wgmma_commit();
        wgmma_wait<0>();
        if (block == 1 && step == 3) release(at.base + OFF_EMPTY + s * 8);
        promote(sum[block], d, tokens, weights.scales(step));
      }
    }
    ring.next();
  }
}

// Sums have the scales of their tokens already.
struct NoScales {
  __device__ __forceinline__ float2 get(int, int) const { return {1.f, 1.f}; }
  __device__ __forceinline__ static float of_one(float2, int, int) { return 1.f; }
};

// A unit of at most N rows: its sums, then its part of the output.
template <int N>
__device__ __forceinline__ void run_unit(const Unit& unit, Worker& at, const float* x_scale, const int* pair_of_row, const Output& out) {
  const int lane = threadIdx.x & 31, group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  TokenScales<N> tokens;
  tokens.load(x_scale, pair_of_row, unit, lane);
  float sum[2][N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[0][i] = sum[1][i] = 0.f;
  multiply<N>(sum, tokens, at, Stages{at, group});
  if (add_splits<N>(sum, at)) finish<N>(sum, NoScales{}, unit, out);
}

#include "sm90/pipeline.cuh"

#define KERNEL sm90_mxfp4_group_scaled_grouped_gemm
#include "sm90_w4a8/family.cuh"
