// What families share whose weights are panels: the register operand of WGMMA, 128 weight rows x 128 k a piece, codes
// first. A unit is two panels, one for each warpgroup, whose two blocks are gate and up of the same columns if GATED.
// A family defines PANEL_BYTES and the places of its stages before.

struct Output {
  u16* __restrict__ to;
  const float* __restrict__ bias;  // [E, W_ROWS]
  ActParameters act;
};

// The part of the output of a unit of at most N rows. A thread has rows f = lane / 4 and f + 8 of a block, which
// layout.py chose such that what a thread writes of a token lies side by side.
template <int N, class Scales>
__device__ __forceinline__ void finish(float (&sum)[2][N / 2], const Scales& scales, const Unit& unit, const Output& out) {
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

// Start loading the two panels of a unit for a stage to `to`; `bar` expects them and the tokens.
__device__ __forceinline__ void load_panels(const u8* w, const Unit& unit, int k, u32 to, int rank, u32 bar) {
  const bool second = unit.n * 2 + 1 < PANELS;
  const u32 x_rows = GATHER ? 0 : rows_of(class_of(unit.rows));
  barrier_expect(bar, (second ? W_BYTES : PANEL_BYTES) + x_rows * 128 * X_PARTS);
  const u8* from = w + (((long long)unit.expert * PANELS + unit.n * 2) * KBLOCKS + k) * PANEL_BYTES;
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
