// The bfloat16 output of families whose weights are the M of WGMMA. A unit is 256 weight rows, two blocks of 64 for each
// of two warpgroups: gate and up of the same columns if GATED. Rows of a block are in such an order that what a thread
// writes of a token lies side by side: `weight_row`.

struct Output {
  u16* __restrict__ to;
  const float* __restrict__ bias;  // [E, W_ROWS]
  ActParameters act;
};

// The first column of the output that a warp has of a unit: of 16 if GATED, else of 32.
__device__ __forceinline__ int first_column(const Unit& unit) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  return GATED ? unit.n * 128 + group * 64 + (warp & 3) * 16 : unit.n * 256 + group * 128 + (warp & 3) * 32;
}
// The row of an expert's weights that a thread has as row lane / 4 + 8 * half of a block, in a warp of first column n.
__device__ __forceinline__ int weight_row(int n, int block, int half) {
  const int f = (threadIdx.x & 31) / 4;
  return GATED ? block * N_OUT + n + f / 2 * 4 + half * 2 + (f & 1) : n + f / 2 * 8 + block * 4 + half * 2 + (f & 1);
}
// The value of `of_rows` [E, W_ROWS] for such a row; 0 behind the last row: a warp's columns may reach beyond N_OUT.
__device__ __forceinline__ float of_weight_row(const float* of_rows, const Unit& unit, int n, int block, int half) {
  const int row = weight_row(n, block, half);
  const bool real = row < N_OUT + (GATED ? block * N_OUT : 0);
  return real ? __ldg(of_rows + (long long)unit.expert * W_ROWS + row) : 0.f;
}

// The part of the output of a unit of at most N rows: sums times `scales`, bias, activation function.
template <int N, class Scales>
__device__ __forceinline__ void finish(float (&sum)[2][N / 2], const Scales& scales, const Unit& unit, const Output& out) {
  const int lane = threadIdx.x & 31, quad = lane & 3, f = lane / 4;
  const int n = first_column(unit);
  const int column = n + quad * (GATED ? 4 : 8);
#if BIAS
  float bias[2][2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) bias[b][half] = of_weight_row(out.bias, unit, n, b, half);
  }
#endif
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    float y[2][4];
    const float2 by = scales.get(i, quad);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[b][j] = sum[b][i * 4 + j] * Scales::of_one(by, b, j & 1);
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
