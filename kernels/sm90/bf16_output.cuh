// The bfloat16 output of families whose weights are the M of WGMMA. A unit is 256 weight rows, two panels of two blocks
// of 64 rows; a warpgroup has a panel, or a block. Rows of a block are in such an order that a thread has gate and up of
// the same columns if GATED, and that what it writes of a token lies side by side: `weight_row`.

struct Output {
  u16* __restrict__ to;
  const float* __restrict__ bias;  // [E, W_ROWS]
  ActParameters act;
};

// The first column of the output that a warp has of a unit: of 16 if GATED, else of 32.
__device__ __forceinline__ int first_column(const Unit& unit) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), panel = panel_of(warp / 4);
  return GATED ? unit.n * 128 + panel * 64 + (warp & 3) * 16 : unit.n * 256 + panel * 128 + (warp & 3) * 32;
}
// The row of an expert's weights that a thread has as row lane / 4 + 8 * half of a block, in a warp of first column n.
__device__ __forceinline__ int weight_row(int n, int block, int half) {
  const int f = (threadIdx.x & 31) / 4;
  return GATED ? half * N_OUT + n + f / 2 * 4 + block * 2 + (f & 1) : n + f / 2 * 8 + block * 4 + half * 2 + (f & 1);
}

// The part of the output of a unit of at most N rows: sums times `scales`, bias, activation function.
template <int N, class Scales>
__device__ __forceinline__ void finish(float (&sum)[BLOCKS][N / 2], const Scales& scales, const Unit& unit, const Output& out) {
  constexpr int HALVES = GATED ? 1 : 2, WORDS = BLOCKS * HALVES;  // of 32 bits, that a thread writes of a token
  const int lane = threadIdx.x & 31, quad = lane & 3, f = lane / 4;
  const int first_block = block_of(__shfl_sync(~0u, threadIdx.x / 128, 0));
  const int n = first_column(unit);
  const int column = n + quad * HALVES * 4 + first_block * HALVES * 2;
#if BIAS
  float bias[BLOCKS][2];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[b][half] = n < N_OUT ? __ldg(out.bias + (long long)unit.expert * W_ROWS + weight_row(n, first_block + b, half)) : 0.f;
    }
  }
#endif
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const float2 by = scales.get(i, quad);
    u32 words[WORDS];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[j] = sum[b][i * 4 + j] * Scales::of_one(by, j / 2, j & 1);
#if BIAS
        y[j] += bias[b][j / 2];
#endif
      }
#if ACTIVATED
#pragma unroll
      for (int j = 0; j < HALVES * 2; ++j) y[j] = activate(y[j], GATED ? y[j + 2 & 3] : 0.f, out.act);
#endif
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        u32& word = words[b * HALVES + half];
        word = pack_bf16(y[half * 2], y[half * 2 + 1]);
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
      }
    }
    const int token = i * 8 + f;
    if (token < unit.rows && column < N_OUT) {
      u16* to = out.to + (long long)(unit.row + token) * N_OUT + column;
      if constexpr (WORDS == 1) *(u32*)to = words[0];
      else if constexpr (WORDS == 2) *(uint2*)to = make_uint2(words[0], words[1]);
      else *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}
