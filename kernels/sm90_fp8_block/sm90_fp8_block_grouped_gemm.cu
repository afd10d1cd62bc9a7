// Grouped GEMM of FP8 rows with FP8 weights in blocks of 128 x 128, for SM90.
//
//   sum[r, n] = sum over k of  x_scale[k / 128, r] * w_scale[e, n / 128, k / 128] * x[r, k] * w[e, n, k]
//
// for the rows r of expert e, products of 128 k summed by the tensor cores and added up in float32; a
// bias is added behind. ACTIVATED: out is an activation function of the sums, quantized again in groups
// of 128; GATED: n runs over gate and up rows, and it is act(gate) * up. Else out is bfloat16.
//
// pipeline.cuh has the loop over units of work, schedule.cuh what CTAs and warps share. TMA fills the stages, a warp
// brings the scales (TMA refuses to start at any row), and each of two warpgroups has two blocks of
//   N < 128   64 weight rows (the M of WGMMA) x N rows of the tile
//   N = 128   64 rows of the tile (the M of WGMMA) x 128 weight rows
// and, GATED, block 0 is gate and block 1 the same columns of up, so that they need no exchange. N is the
// smallest class of the tile's rows: what is left over of a large expert costs what it is, not ROWS.
// A tile of 128 rows may have up to EXTRA more, as N beside it: they take no loads of weights.
//
// Compile-time, beside the classes and what schedule.cuh has: EXTRA, ACTIVATED, GATED, ACT, LIMITED, BIAS, N_OUT
// (columns of out), N_REAL (those that are not padding), W_ROWS (weight rows an expert).

#include "sm90/ptx.cuh"

constexpr int SCALE_WARPS = 1, X_PARTS = 1;
constexpr int MATH_REGISTERS = EXTRA > 0 ? 232 : 224, OTHER_REGISTERS = EXTRA > 0 ? 40 : 56;  // of a thread
constexpr int W_SCALE_ROWS = (W_ROWS + 127) / 128;
constexpr int X_SCALE_PITCH = (KBLOCKS + 3) / 4 * 4;  // GATHER: x_scale is [tokens, X_SCALE_PITCH]
constexpr u32 W_BYTES = 256 * 128;
constexpr int MOST_ROWS = ROWS + EXTRA;  // of a tile
constexpr u32 X_BYTES = MOST_ROWS * 128;
constexpr u32 SCALE_PITCH = (MOST_ROWS * 4 + 127) / 128 * 128;
constexpr u32 OFF_X = STAGES * W_BYTES;
constexpr int GROUPS = ACTIVATED && !GATED ? 2 : 1;  // of 128 columns of a unit's output
constexpr int BOXES = ACTIVATED && GATED ? 1 : 2;  // of 16 rows x 128 bytes
constexpr u32 WARP_STAGING = BOXES * 2048;
constexpr u32 STAGING_BYTES = ROWS == 128 ? 8 * WARP_STAGING : ACTIVATED ? GROUPS * ROWS * 128 : 0;
constexpr u32 OFF_STAGING = OFF_X + STAGES * X_BYTES;
constexpr u32 OFF_SCALE = OFF_STAGING + STAGING_BYTES;
constexpr u32 OFF_W_SCALE = OFF_SCALE + STAGES * SCALE_PITCH;
constexpr u32 OFF_FULL = OFF_W_SCALE + STAGES * 8;
constexpr u32 SCRATCH_BYTES = ACTIVATED && ROWS < 128 ? 8 * ROWS * 4 : 0;
static_assert(EXTRA == 0 || (ROWS == 128 && !GATHER), "only whole tiles that are not gathered have extra rows");

#include "sm90/schedule.cuh"

constexpr u32 OFF_AMAX = ROWS == 128 ? OFF_STAGING + GROUPS * SWAP_ROWS * 128 : OFF_SCRATCH;

__device__ __forceinline__ void math_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
//CLASSES

template <int ACC>
__device__ __forceinline__ void multiply(float (&d)[ACC], u32 a, u32 b) {
  const u64 a_desc = descriptor(a), b_desc = descriptor(b);
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(d, a_desc + 2 * k, b_desc + 2 * k, k > 0);
}

#include "sm90/activation.cuh"

__device__ __forceinline__ float scale_of(float amax) {
  const float scale = __fdiv_rn(amax, 448.f);
  return scale == 0.f ? 1.f : scale;
}

// The reciprocal of a smaller scale would be Inf, and make NaN of 0.
__device__ __forceinline__ float inverse_of(float scale) { return __fdividef(1.f, fmaxf(scale, 1.2e-38f)); }

// Rows of block 0 or 1 of a unit's weights that are not padding; those that are loaded, 64 at a time.
constexpr bool RAGGED = N_REAL % (GATED ? 128 : 256) != 0;
__device__ __forceinline__ int real_rows(int n, int block) {
  if (!RAGGED) return 128;
  return GATED ? N_REAL - n * 128 : N_REAL - n * 256 - block * 128;
}
__device__ __forceinline__ int loaded_rows(int n, int block) {
  const int rows = real_rows(n, block);
  return rows > 64 ? 128 : rows > 0 ? 64 : 0;
}
struct Output {
  u8* __restrict__ to;
  float* __restrict__ scale;
  int scale_stride;
  const float* __restrict__ bias;  // [E, W_ROWS]
  ActParameters act;
  const TensorMap* map;  // of `to`, boxes of 16 rows x 128 bytes
};

// The part of the output of a unit of at most N rows, of sums with weights as M.
template <int N>
__device__ __forceinline__ void finish_few(float (&sum)[2][N / 2], u8* smem, const Unit& unit, const Output& out) {
  constexpr int ACC = N / 2;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4, quad = lane & 3;
#if BIAS
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_block = (warp & 3) * 16 + lane / 4 + half * 8;
      const int n = GATED ? b * N_OUT + unit.n * 128 + group * 64 + in_block : unit.n * 256 + group * 128 + b * 64 + in_block;
      const float bias = n < W_ROWS ? __ldg(out.bias + (long long)unit.expert * W_ROWS + n) : 0.f;
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        sum[b][i * 4 + half * 2] += bias;
        sum[b][i * 4 + half * 2 + 1] += bias;
      }
    }
  }
#endif
#if ACTIVATED
  float* amax_of = (float*)(smem + OFF_AMAX);
  constexpr int WARPS = 8 / GROUPS;  // that share a group of columns
  u8* staging = smem + OFF_STAGING + (GROUPS == 2 ? group * SWAP_ROWS * 128 : 0);
#pragma unroll
  for (int i = 0; i < ACC; ++i) {
    sum[0][i] = activate(sum[0][i], sum[1][i], out.act);
    if (!GATED) sum[1][i] = activate(sum[1][i], 0.f, out.act);
  }
  if (N_REAL % 128 != 0) {  // sums of weights that were not loaded
#pragma unroll
    for (int b = 0; b < GROUPS; ++b) {
      const int n = (GATED ? unit.n * 128 + group * 64 : unit.n * 256 + group * 128 + b * 64) + (warp & 3) * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < ACC; ++i)
        if (n + (i & 2) * 4 >= N_REAL) sum[b][i] = 0.f;
    }
  }
  if (ROWS == 128) {  // the other class stores from `staging`
    if (lane == 0) await_stores_read<0>();
    math_sync();
  }
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float amax = fmaxf(fabsf(sum[0][i * 4 + j]), fabsf(sum[0][i * 4 + j + 2]));
      if (!GATED) amax = fmaxf(amax, fmaxf(fabsf(sum[1][i * 4 + j]), fabsf(sum[1][i * 4 + j + 2])));
#pragma unroll
      for (int x = 4; x < 32; x *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, x));
      if (lane < 4) amax_of[warp * N + i * 8 + quad * 2 + j] = amax;
    }
  }
  math_sync();
  const int first_warp = GROUPS == 2 ? group * 4 : 0, column_group = unit.n * GROUPS + (GROUPS == 2 ? group : 0);
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = i * 8 + quad * 2 + j;
      float amax = amax_of[first_warp * N + token];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) amax = fmaxf(amax, amax_of[(first_warp + w) * N + token]);
      const float scale = scale_of(amax), inverse = inverse_of(scale);
#pragma unroll
      for (int b = 0; b < GROUPS; ++b) {
        const u16 codes = pack_e4m3(sum[b][i * 4 + j] * inverse, sum[b][i * 4 + j + 2] * inverse);
        u8* to = staging + token * 128 + (GROUPS == 2 ? b * 64 + (warp & 3) * 16 : warp * 16) + lane / 4;
        to[0] = (u8)codes;
        to[8] = (u8)(codes >> 8);
      }
      if (warp == first_warp && lane < 4 && token < unit.rows && column_group * 128 < N_OUT)
        out.scale[(long long)column_group * out.scale_stride + unit.row + token] = scale;
    }
  }
  math_sync();
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const int n = (unit.n * GROUPS + g) * 128;
    if (n >= N_OUT) break;
    for (int i = threadIdx.x; i < unit.rows * 8; i += MATH_THREADS)
      *(uint4*)(out.to + (long long)(unit.row + i / 8) * N_OUT + n + (i & 7) * 16) =
          *(uint4*)(smem + OFF_STAGING + g * SWAP_ROWS * 128 + i * 16);
  }
  if (ROWS == 128) math_sync();  // it uses `staging` by warps
#else
  u16* to_out = (u16*)out.to;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int n = unit.n * 256 + group * 128 + b * 64 + (warp & 3) * 16 + quad * 2;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 word = pack_bf16(sum[b][i * 4 + half * 2], sum[b][i * 4 + half * 2 + 1]);
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
        const int token = i * 8 + lane / 4;
        if (token < unit.rows && n + half * 8 < N_OUT)
          *(u32*)(to_out + (long long)(unit.row + token) * N_OUT + n + half * 8) = word;
      }
    }
  }
#endif
}

// Sums of a unit of at most N rows, weights as M; then its part of the output.
template <int N>
__device__ __forceinline__ void few_rows(const Unit& unit, Worker& at, const Output& out) {
  constexpr int ACC = N / 2;
  u8* smem = at.smem;
  const u32 base = at.base;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4, quad = lane & 3;
  float sum[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;

  for (int k = at.k_begin; k < at.k_end; ++k) {
    const u32 s = at.ring.stage;
    barrier_wait(base + OFF_FULL + s * 8, at.ring.parity);
    see_copies();
    const u32 w = base + s * W_BYTES + group * (GATED ? 8192 : W_BYTES / 2), x = base + OFF_X + s * X_BYTES;
    const float* xs = (const float*)(smem + OFF_SCALE + s * SCALE_PITCH);
    const float2 ws = *(const float2*)(smem + OFF_W_SCALE + s * 8);
    const float by0 = !GATED && group ? ws.y : ws.x, by1 = !GATED && !group ? ws.x : ws.y;
    float2 scale[N / 8];
#pragma unroll
    for (int i = 0; i < N / 8; ++i) scale[i] = *(const float2*)(xs + i * 8 + quad * 2);
    auto start = [&](float (&d)[ACC], u32 a) {
      pin(d);
      wgmma_fence();
      multiply(d, a, x);
      wgmma_commit();
    };
    auto promote = [&](float (&to)[ACC], float (&d)[ACC], float by) {
      pin(d);
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        const float even = scale[i].x * by, odd = scale[i].y * by;
        to[i * 4] += even * d[i * 4];
        to[i * 4 + 1] += odd * d[i * 4 + 1];
        to[i * 4 + 2] += even * d[i * 4 + 2];
        to[i * 4 + 3] += odd * d[i * 4 + 3];
      }
    };
    float d0[ACC], d1[ACC];
    start(d0, w);
    start(d1, w + (GATED ? W_BYTES / 2 : 8192));
    wgmma_wait<1>();
    promote(sum[0], d0, by0);
    wgmma_wait<0>();
    pin(d1);
    release(base + OFF_EMPTY + s * 8);
    promote(sum[1], d1, by1);
    at.ring.next();
  }

  if (add_splits<N>(sum, at)) finish_few<N>(sum, smem, unit, out);
}

#if ROWS == 128
// The same for 65 to 128 rows, rows as M. LONGER: and up to EXTRA more, weights as M.
template <bool LONGER>
__device__ __forceinline__ void many_rows(const Unit& unit, Worker& at, const Output& out) {
  constexpr int ACC = 64;
  u8* smem = at.smem;
  const u32 base = at.base;
  Ring& ring = at.ring;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4, quad = lane & 3;
  float sum[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;
  constexpr int MORE = LONGER ? EXTRA : 16;  // else not used
  float more[2][MORE / 2];
#pragma unroll
  for (int i = 0; i < MORE / 2; ++i) more[0][i] = more[1][i] = 0.f;

  // The scales of a stage, once it is full.
  float x0, x1;
  float2 by;
  auto await = [&]() {
    barrier_wait(base + OFF_FULL + ring.stage * 8, ring.parity);
    see_copies();
    const float* xs = (const float*)(smem + OFF_SCALE + ring.stage * SCALE_PITCH) + group * 64 + (warp & 3) * 16 + lane / 4;
    x0 = xs[0], x1 = xs[8];
    by = *(const float2*)(smem + OFF_W_SCALE + ring.stage * 8);
  };
  auto promote = [&](float (&to)[ACC], float (&d)[ACC], float top, float bottom) {
    pin(d);
#pragma unroll
    for (int i = 0; i < ACC; i += 4) {
      to[i] += top * d[i];
      to[i + 1] += top * d[i + 1];
      to[i + 2] += bottom * d[i + 2];
      to[i + 3] += bottom * d[i + 3];
    }
  };
  await();
  for (int k = 0; k < KBLOCKS; ++k) {
    const u32 s = ring.stage, w_at = base + s * W_BYTES, x_at = base + OFF_X + s * X_BYTES;
    float d[ACC];
    auto start = [&](int block) {
      pin(d);
      wgmma_fence();
      multiply(d, x_at + group * 8192, w_at + block * (W_BYTES / 2));
      wgmma_commit();
    };
    start(0);
    const float top0 = x0 * by.x, bottom0 = x1 * by.x, top1 = x0 * by.y, bottom1 = x1 * by.y;
    const float more_by0 = !GATED && group ? by.y : by.x, more_by1 = !GATED && !group ? by.x : by.y;
    wgmma_wait<0>();
    promote(sum[0], d, top0, bottom0);
    start(1);
    ring.next();
    if constexpr (!LONGER) {
      if (k + 1 < KBLOCKS) await();  // hidden behind the multiplication
      wgmma_wait<0>();
      release(base + OFF_EMPTY + s * 8);
      promote(sum[1], d, top1, bottom1);
    } else {
      wgmma_wait<0>();
      promote(sum[1], d, top1, bottom1);
      const u32 w = w_at + group * (GATED ? 8192 : W_BYTES / 2), x = x_at + ROWS * 128;
      float e0[MORE / 2], e1[MORE / 2];
      pin(e0), pin(e1);
      wgmma_fence();
      multiply(e0, w, x);
      multiply(e1, w + (GATED ? W_BYTES / 2 : 8192), x);
      wgmma_commit();
      const float* xs = (const float*)(smem + OFF_SCALE + s * SCALE_PITCH) + ROWS + quad * 2;
      float2 scale[MORE / 8];
#pragma unroll
      for (int i = 0; i < MORE / 8; ++i) scale[i] = *(const float2*)(xs + i * 8);
      if (k + 1 < KBLOCKS) await();
      wgmma_wait<0>();
      pin(e0), pin(e1);
      release(base + OFF_EMPTY + s * 8);
#pragma unroll
      for (int i = 0; i < MORE / 2; ++i) {
        const float by_row = i & 1 ? scale[i / 4].y : scale[i / 4].x;
        more[0][i] += by_row * more_by0 * e0[i];
        more[1][i] += by_row * more_by1 * e1[i];
      }
    }
  }

  // 16 rows of 128 bytes, 16-byte chunks swizzled by row as TMA does; BOXES of them, in turns.
  const int r = lane / 4, first = group * 64 + (warp & 3) * 16;
  const bool whole = first + 16 <= unit.rows;
  auto staging_of = [&](int turn) { return OFF_STAGING + warp * WARP_STAGING + turn % BOXES * 2048; };
  auto await_staging = [&]() {
    if (lane == 0) await_stores_read<BOXES - 1>();
    __syncwarp();
  };
  auto flush = [&](int turn, int column_byte, int pitch) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (whole) {
      if (lane == 0) store_2d(out.map, column_byte, unit.row + first, base + staging_of(turn));
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, chunk = lane & 7;
      if (first + row < unit.rows && column_byte + chunk * 16 < pitch)
        *(uint4*)(out.to + (long long)(unit.row + first + row) * pitch + column_byte + chunk * 16) =
            *(uint4*)(smem + staging_of(turn) + row * 128 + ((chunk ^ (row & 7)) * 16));
    }
    __syncwarp();
  };
#if BIAS
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int n = (GATED ? b * N_OUT + unit.n * 128 : unit.n * 256 + b * 128) + i * 8 + quad * 2;
      if (n >= W_ROWS) continue;
      const float2 bias = __ldg((const float2*)(out.bias + (long long)unit.expert * W_ROWS + n));
      sum[b][i * 4] += bias.x;
      sum[b][i * 4 + 1] += bias.y;
      sum[b][i * 4 + 2] += bias.x;
      sum[b][i * 4 + 3] += bias.y;
    }
  }
#endif
#if ACTIVATED
#pragma unroll
  for (int b = 0; b < GROUPS; ++b) {
    const int n = unit.n * GROUPS + b;
    if (n * 128 >= N_OUT) break;
    float amax0 = 0.f, amax1 = 0.f;
#pragma unroll
    for (int i = 0; i < ACC; ++i) {
      sum[b][i] = activate(sum[b][i], GATED ? sum[1][i] : 0.f, out.act);
      if (N_REAL % 128 != 0 && n * 128 + i / 4 * 8 + quad * 2 + (i & 1) >= N_REAL) sum[b][i] = 0.f;
      if (i & 2) amax1 = fmaxf(amax1, fabsf(sum[b][i])); else amax0 = fmaxf(amax0, fabsf(sum[b][i]));
    }
#pragma unroll
    for (int x = 1; x < 4; x *= 2) {
      amax0 = fmaxf(amax0, __shfl_xor_sync(~0u, amax0, x));
      amax1 = fmaxf(amax1, __shfl_xor_sync(~0u, amax1, x));
    }
    const float scale0 = scale_of(amax0), scale1 = scale_of(amax1);
    const float inverse0 = inverse_of(scale0), inverse1 = inverse_of(scale1);
    if (quad < 2 && first + r + quad * 8 < unit.rows)
      out.scale[(long long)n * out.scale_stride + unit.row + first + r + quad * 8] = quad ? scale1 : scale0;
    u8* staging = smem + staging_of(b);
    await_staging();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int at = ((i / 2) ^ r) * 16 + (i & 1) * 8 + quad * 2;
      *(u16*)(staging + r * 128 + at) = pack_e4m3(sum[b][i * 4] * inverse0, sum[b][i * 4 + 1] * inverse0);
      *(u16*)(staging + (r + 8) * 128 + at) = pack_e4m3(sum[b][i * 4 + 2] * inverse1, sum[b][i * 4 + 3] * inverse1);
    }
    flush(b, n * 128, N_OUT);
  }
#else
  const int row = lane & 15, half = lane / 16;  // of this lane's address for store_matrices
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    float (&from)[ACC] = sum[part / 2];
    const u32 to = base + staging_of(part & 1) + row * 128;
    await_staging();
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int j = ((part & 1) * 8 + i) * 4;
      store_matrices(to + ((i + half) ^ (row & 7)) * 16,
                     pack_bf16(from[j], from[j + 1]), pack_bf16(from[j + 2], from[j + 3]),
                     pack_bf16(from[j + 4], from[j + 5]), pack_bf16(from[j + 6], from[j + 7]));
    }
    flush(part & 1, (unit.n * 256 + part * 64) * 2, N_OUT * 2);
  }
#endif
  if constexpr (LONGER) finish_few<MORE>(more, smem, {unit.expert, unit.row + ROWS, unit.rows - ROWS, unit.n}, out);
}

#endif

#include "sm90/pipeline.cuh"

struct Fp8Blocks {
  const TensorMap *w_map, *w_tail_map;  // boxes of 128 and of 64 weight rows
  const XMaps& x_maps;
  const float* w_scale;
  const float* x_scale;
  int scale_stride;
  const int* pair_of_row;
  Output out;

  __device__ __forceinline__ void load_weights(const Unit& unit, int k, u32 base, u32 s, int rank, u32 bar) const {
    const int x_rows = GATHER ? 0 : rows_of(class_of(unit.rows)) + (unit.rows > ROWS ? EXTRA : 0);
    barrier_expect(bar, (loaded_rows(unit.n, 0) + loaded_rows(unit.n, 1) + x_rows) * 128);
    const int row = unit.expert * W_ROWS + unit.n * (GATED ? 128 : 256);
    const int second = row + (GATED ? N_OUT : 128);
    const u32 to = base + s * W_BYTES;
    // Of the last rows the half of a block or nothing, where the rest is padding.
    auto map_of_block = [&](int block) { return loaded_rows(unit.n, block) == 64 ? w_tail_map : w_map; };
    const bool no_second = loaded_rows(unit.n, 1) == 0;
#if PAIR > 1
    if (unit.shared) {
      if (!no_second || rank == 0) load_2d_pair(to + rank * (W_BYTES / 2), map_of_block(rank), k * 128, rank ? second : row, bar);
      return;
    }
#endif
    if (unit.alone) {
      load_2d_streaming(to, map_of_block(0), k * 128, row, bar);
      if (!no_second) load_2d_streaming(to + W_BYTES / 2, map_of_block(1), k * 128, second, bar);
    } else {
      load_2d(to, map_of_block(0), k * 128, row, bar);
      if (!no_second) load_2d(to + W_BYTES / 2, map_of_block(1), k * 128, second, bar);
    }
  }
  __device__ __forceinline__ void load_x(const Unit& unit, const TensorMap* map, int k, u32 base, u32 s, u32 bar) const {
    load_2d(base + OFF_X + s * X_BYTES, map, k * 128, unit.row, bar);
    if (EXTRA > 0 && unit.rows > ROWS) load_2d(base + OFF_X + s * X_BYTES + ROWS * 128, &x_maps.of[0], k * 128, unit.row + ROWS, bar);
  }
  __device__ __forceinline__ void bring_scales(const Unit& unit, int k_begin, int k_end, u8* smem, u32 base, int lane, u32& s, u32& parity) const {
    int row = GATED ? unit.n + (lane & 1) * (N_OUT / 128) : unit.n * 2 + (lane & 1);
    row = min(row, W_SCALE_ROWS - 1);
    const float* w_from = w_scale + ((long long)unit.expert * W_SCALE_ROWS + row) * KBLOCKS;
    constexpr int LOADS = (MOST_ROWS + 31) / 32;
#if GATHER
    const float* x_from[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      x_from[i] = x_scale + (long long)(__ldcg(pair_of_row + unit.row + min(i * 32 + lane, max(unit.rows - 1, 0))) / GATHER) * X_SCALE_PITCH;
    float4 four[LOADS], ahead[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) ahead[i] = __ldcg((const float4*)x_from[i]);
#else
    const float* x_from = x_scale + unit.row + lane;
#endif
    float w = 0.f, x[LOADS];
    auto load = [&](int k) {
      w = __ldg(w_from + k);
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
#if GATHER
        if (k % 4 == 0) {
          four[i] = ahead[i];
          if (k + 4 < KBLOCKS) ahead[i] = __ldcg((const float4*)(x_from[i] + k + 4));
        }
        x[i] = k % 4 == 0 ? four[i].x : k % 4 == 1 ? four[i].y : k % 4 == 2 ? four[i].z : four[i].w;
#else
        x[i] = i * 32 + lane < unit.rows ? __ldcg(x_from + (long long)k * scale_stride + i * 32) : 0.f;
#endif
      }
    };
    load(k_begin);
    for (int k = k_begin; k < k_end; ++k) {
      float* to = (float*)(smem + OFF_SCALE + s * SCALE_PITCH) + lane;
      barrier_wait(base + OFF_EMPTY + s * 8, parity);
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
        if (i * 32 + lane < MOST_ROWS) to[i * 32] = x[i];
      if (lane < 2) *(float*)(smem + OFF_W_SCALE + s * 8 + lane * 4) = w;
      barrier_arrive(base + OFF_FULL + s * 8);
      if (k + 1 < k_end) load(k + 1);
      if (++s == STAGES) s = 0, parity ^= 1;
    }
  }
  template <int N>
  __device__ __forceinline__ void run_unit(const Unit& unit, Worker& at) const {
#if ROWS == 128
    if constexpr (N == 128) {
      if (unit.rows <= ROWS) many_rows<false>(unit, at, out);
      else if constexpr (EXTRA > 0) many_rows<true>(unit, at, out);
      return;
    }
#endif
    if constexpr (N < 128) few_rows<N>(unit, at, out);
  }
  __device__ __forceinline__ void end(int lane) const {
    if (ROWS == 128 && lane == 0) await_stores();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sm90_fp8_block_grouped_gemm(
    const int4* tiles, const int* tile_count, int* units_taken, const u8* x, const float* x_scale, const int* pair_of_row,
    u8* __restrict__ out, const float* __restrict__ bias, const ActParameters act, const __grid_constant__ Routing routing,
    const __grid_constant__ XMaps x_maps, const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap w_tail_map,
    const __grid_constant__ TensorMap out_map, const float* __restrict__ w_scale, float* __restrict__ out_scale, int scale_stride) {
  extern __shared__ __align__(1024) u8 smem[];
  Fp8Blocks family{&w_map, &w_tail_map, x_maps, w_scale, x_scale, scale_stride, pair_of_row, {out, out_scale, scale_stride, bias, act, &out_map}};
  grouped_gemm(family, {tiles, tile_count, units_taken, x, pair_of_row}, routing, smem);
}
