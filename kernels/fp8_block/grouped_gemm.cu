// Grouped GEMM of FP8 rows with FP8 weights in blocks of 128 x 128, for SM90.
//
//   out[r, n] = sum over k of  x_scale[k / 128, r] * w_scale[e, n / 128, k / 128] * x[r, k] * w[e, n, k]
//
// for the rows r of expert e, products of 128 k summed by the tensor cores and added up in float32.
// GATED: n runs over gate and up rows, and out is silu(gate) * up quantized again in groups of 128.
//
// A persistent CTA works through units, the next free one each time, as units differ in cost: a tile of
// rows (a run of at most ROWS rows of one expert) times 256 weight rows. One thread fills a ring of
// shared-memory stages by TMA, a warp beside it brings the scales (TMA refuses to start at any row), and
// two warpgroups multiply: each has two blocks of
//   N < 128   64 weight rows (the M of WGMMA) x N rows of the tile
//   N = 128   64 rows of the tile (the M of WGMMA) x 128 weight rows
// and, GATED, block 0 is gate and block 1 the same columns of up, so SwiGLU needs no exchange. N is the
// smallest class of the tile's rows: what is left over of a large expert costs what it is, not ROWS.
// SPLIT CTAs of a cluster share a unit along K; the first adds up their sums, in their order.
//
// Compile-time: ROWS, GATED, STAGES, SPLIT, KBLOCKS (ceil(K / 128)), UNITS_N (units along n), N_OUT
// (columns of out), W_ROWS (weight rows an expert), W_SCALE_ROWS, EARLY (weights do not wait for the
// kernel in front).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };

constexpr int THREADS = 384;
constexpr int MATH_THREADS = 256;
constexpr u32 W_BYTES = 256 * 128;
constexpr u32 X_BYTES = ROWS * 128;
constexpr u32 SCALE_PITCH = (ROWS * 4 + 127) / 128 * 128;
constexpr int SWAP_ROWS = ROWS < 64 ? ROWS : 64;  // most rows of a tile whose M is weights
constexpr u32 OFF_X = STAGES * W_BYTES;
constexpr u32 OFF_SCALE = OFF_X + STAGES * X_BYTES;
constexpr u32 OFF_W_SCALE = OFF_SCALE + STAGES * SCALE_PITCH;
constexpr u32 OFF_FULL = OFF_W_SCALE + STAGES * 8;
constexpr u32 OFF_EMPTY = OFF_FULL + STAGES * 8;
constexpr u32 OFF_SPLIT = OFF_EMPTY + STAGES * 8;  // two barriers
constexpr u32 OFF_QUEUE = OFF_SPLIT + 16;  // two units, then their full and empty barriers
constexpr u32 OFF_AMAX = (OFF_QUEUE + 48 + 127) / 128 * 128;
constexpr u32 OFF_STAGING = OFF_AMAX + (GATED ? 8 * SWAP_ROWS * 4 : 0);
constexpr u32 STAGING_BYTES = ROWS == 128 ? 8 * 2048 : GATED ? SWAP_ROWS * 128 : 0;
constexpr u32 OFF_PARTIAL = OFF_STAGING + STAGING_BYTES;
static_assert(SPLIT == 1 || ROWS <= 32, "split sums do not fit");

__device__ __forceinline__ u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra end;\nbra again;\nend:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void barrier_arrive_in(u32 there) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
__device__ __forceinline__ void barrier_wait_cluster(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra end;\nbra again;\nend:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void store_in(u32 there, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void math_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__device__ __forceinline__ void load_2d(u32 to, const TensorMap* map, int c0, int c1, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1) : "memory");
}

// What is read once is first to leave L2: 7 % more bandwidth than without the hint.
__device__ __forceinline__ void load_2d_streaming(u32 to, const TensorMap* map, int c0, int c1, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "l"(0x12F0000000000000ull) : "memory");
}

// Shared-memory matrix of 128-byte rows, 128-byte swizzle, K contiguous.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int ACC>
__device__ __forceinline__ void pin(float (&d)[ACC]) {
#pragma unroll
  for (int i = 0; i < ACC; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
//WGMMA

template <int ACC>
__device__ __forceinline__ void multiply(float (&d)[ACC], u32 a, u32 b) {
  const u64 a_desc = descriptor(a), b_desc = descriptor(b);
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(d, a_desc + 2 * k, b_desc + 2 * k, k > 0);
}

struct Unit { int expert, row, rows, n; bool alone; };

__device__ __forceinline__ Unit unit_of(const int4* __restrict__ tiles, int u) {
  const int q = u / UNITS_N;
  int4 tile = tiles[q];
  int n = u - q * UNITS_N;
  const int count = tile.w >> 16;
  if (count > 1) {  // the tiles of one expert share weights: run them side by side
    const int first = tile.w & 0xFFFF, local = u - first * UNITS_N;
    n = local / count;
    tile = tiles[first + local - n * count];
  }
  return {tile.x, tile.y, tile.z, n, count == 1};
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ u16 pack_e4m3(float lo, float hi) {
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float scale_of(float amax) { return amax == 0.f ? 1.f : __fdiv_rn(amax, 448.f); }

// Rows that the multiplication of a tile of `rows` rows computes.
__device__ __forceinline__ int class_of(int rows) {
  if (ROWS > 8 && rows <= 16) return 16;
  if (ROWS > 32 && rows <= 32) return 32;
  if (ROWS > 64 && rows <= 64) return 64;
  return ROWS;
}
struct XMaps { TensorMap of[4]; };  // boxes of 8 or 16, 32, 64 and 128 rows
__device__ __forceinline__ int map_of(int rows) { return rows <= 16 ? 0 : rows == 32 ? 1 : rows == 64 ? 2 : 3; }

// A ring of stages as a reader sees it.
struct Ring {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() { if (++stage == STAGES) stage = 0, parity ^= 1; }
};

// The producer's choice of units, two at a time, as the other warps see it.
struct Queue {
  u32 base, turn = 0;
  __device__ __forceinline__ explicit Queue(u32 smem) : base(smem + OFF_QUEUE) {}
  __device__ __forceinline__ u32 slot() const { return turn & 1; }
  __device__ __forceinline__ void push(int unit) {
    barrier_wait(base + 32 + slot() * 8, (turn >> 1 & 1) ^ 1);
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(base + slot() * 8), "r"(unit) : "memory");
    barrier_arrive(base + 16 + slot() * 8);
    ++turn;
  }
  __device__ __forceinline__ int pop(int lane) {
    barrier_wait(base + 16 + slot() * 8, turn >> 1 & 1);
    int unit;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(unit) : "r"(base + slot() * 8) : "memory");
    __syncwarp();
    if (lane == 0) barrier_arrive(base + 32 + slot() * 8);
    ++turn;
    return __shfl_sync(~0u, unit, 0);
  }
};

struct Output {
  u8* __restrict__ to;
  float* __restrict__ scale;
  int scale_stride;
};

// Sums of a unit of at most N rows, weights as M; then its part of the output.
template <int N>
__device__ __forceinline__ void few_rows(u8* smem, u32 base, const Unit& unit, int k_begin, int k_end, int rank, Ring& ring, u32& split_parity, const Output& out) {
  constexpr int ACC = N / 2;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4, quad = lane & 3;
  float sum[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;

  for (int k = k_begin; k < k_end; ++k) {
    const u32 s = ring.stage;
    barrier_wait(base + OFF_FULL + s * 8, ring.parity);
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
    if (lane == 0) barrier_arrive(base + OFF_EMPTY + s * 8);
    promote(sum[1], d1, by1);
    ring.next();
  }

#if SPLIT > 1
  if (rank > 0) {
    barrier_wait_cluster(base + OFF_SPLIT + 8, split_parity ^ 1);
    const u32 to = address_in(base + OFF_PARTIAL + (rank - 1) * N * MATH_THREADS * 4, 0) + threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < N; ++i) store_in(to + i * MATH_THREADS * 4, sum[i / ACC][i % ACC]);
    barrier_arrive_in(address_in(base + OFF_SPLIT, 0));
    split_parity ^= 1;
    return;
  }
  barrier_wait_cluster(base + OFF_SPLIT, split_parity);
#pragma unroll
  for (int other = 0; other < SPLIT - 1; ++other) {
    const float* from = (const float*)(smem + OFF_PARTIAL) + other * N * MATH_THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i / ACC][i % ACC] += from[i * MATH_THREADS];
  }
  for (int other = 1; other < SPLIT; ++other) barrier_arrive_in(address_in(base + OFF_SPLIT + 8, other));
  split_parity ^= 1;
#endif

#if GATED
  float* amax_of = (float*)(smem + OFF_AMAX);
  u8* staging = smem + OFF_STAGING;
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = silu(sum[0][i]) * sum[1][i];
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float amax = fmaxf(fabsf(sum[0][i * 4 + j]), fabsf(sum[0][i * 4 + j + 2]));
#pragma unroll
      for (int x = 4; x < 32; x *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, x));
      if (lane < 4) amax_of[warp * N + i * 8 + quad * 2 + j] = amax;
    }
  }
  math_sync();
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = i * 8 + quad * 2 + j;
      float amax = amax_of[token];
#pragma unroll
      for (int w = 1; w < 8; ++w) amax = fmaxf(amax, amax_of[w * N + token]);
      const float scale = scale_of(amax), inverse = __fdividef(1.f, scale);
      const u16 codes = pack_e4m3(sum[0][i * 4 + j] * inverse, sum[0][i * 4 + j + 2] * inverse);
      u8* to = staging + token * 128 + warp * 16 + lane / 4;
      to[0] = (u8)codes;
      to[8] = (u8)(codes >> 8);
      if (warp == 0 && lane < 4 && token < unit.rows) out.scale[(long long)unit.n * out.scale_stride + unit.row + token] = scale;
    }
  }
  math_sync();
  for (int i = threadIdx.x; i < unit.rows * 8; i += MATH_THREADS)
    *(uint4*)(out.to + (long long)(unit.row + i / 8) * N_OUT + unit.n * 128 + (i & 7) * 16) = *(uint4*)(staging + i * 16);
  if (ROWS == 128) math_sync();  // the other class uses `staging` by warps
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

#if ROWS == 128
// The same for 65 to 128 rows, rows as M.
__device__ __forceinline__ void many_rows(u8* smem, u32 base, const Unit& unit, Ring& ring, const Output& out) {
  constexpr int ACC = 64;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4, quad = lane & 3;
  float sum[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;

  for (int k = 0; k < KBLOCKS; ++k) {
    const u32 s = ring.stage;
    barrier_wait(base + OFF_FULL + s * 8, ring.parity);
    const u32 w = base + s * W_BYTES, x = base + OFF_X + s * X_BYTES + group * 8192;
    const float* xs = (const float*)(smem + OFF_SCALE + s * SCALE_PITCH) + group * 64 + (warp & 3) * 16 + lane / 4;
    const float2 ws = *(const float2*)(smem + OFF_W_SCALE + s * 8);
    const float scale0 = xs[0], scale1 = xs[8];
    float d[ACC];
    auto start = [&](u32 b) {
      pin(d);
      wgmma_fence();
      multiply(d, x, b);
      wgmma_commit();
      wgmma_wait<0>();
      pin(d);
    };
    auto promote = [&](float (&to)[ACC], float by) {
      const float top = scale0 * by, bottom = scale1 * by;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        to[i * 4] += top * d[i * 4];
        to[i * 4 + 1] += top * d[i * 4 + 1];
        to[i * 4 + 2] += bottom * d[i * 4 + 2];
        to[i * 4 + 3] += bottom * d[i * 4 + 3];
      }
    };
    start(w);
    promote(sum[0], ws.x);
    start(w + W_BYTES / 2);
    if (lane == 0) barrier_arrive(base + OFF_EMPTY + s * 8);
    promote(sum[1], ws.y);
    ring.next();
  }

  u8* staging = smem + OFF_STAGING + warp * 2048;
  const int r = lane / 4, first = group * 64 + (warp & 3) * 16;
  // 16 rows of 128 bytes, 16-byte chunks swizzled by row, to `columns` of the output rows.
  auto flush = [&](u8* to, long long pitch, int bytes) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, chunk = lane & 7;
      if (first + row < unit.rows && chunk * 16 < bytes)
        *(uint4*)(to + (unit.row + first + row) * pitch + chunk * 16) = *(uint4*)(staging + row * 128 + ((chunk ^ (row & 7)) * 16));
    }
    __syncwarp();
  };
#if GATED
  float amax0 = 0.f, amax1 = 0.f;
#pragma unroll
  for (int i = 0; i < ACC; ++i) {
    sum[0][i] = silu(sum[0][i]) * sum[1][i];
    if (i & 2) amax1 = fmaxf(amax1, fabsf(sum[0][i])); else amax0 = fmaxf(amax0, fabsf(sum[0][i]));
  }
#pragma unroll
  for (int x = 1; x < 4; x *= 2) {
    amax0 = fmaxf(amax0, __shfl_xor_sync(~0u, amax0, x));
    amax1 = fmaxf(amax1, __shfl_xor_sync(~0u, amax1, x));
  }
  const float scale0 = scale_of(amax0), scale1 = scale_of(amax1);
  const float inverse0 = __fdividef(1.f, scale0), inverse1 = __fdividef(1.f, scale1);
  if (quad < 2 && first + r + quad * 8 < unit.rows)
    out.scale[(long long)unit.n * out.scale_stride + unit.row + first + r + quad * 8] = quad ? scale1 : scale0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = ((i / 2) ^ r) * 16 + (i & 1) * 8 + quad * 2;
    *(u16*)(staging + r * 128 + at) = pack_e4m3(sum[0][i * 4] * inverse0, sum[0][i * 4 + 1] * inverse0);
    *(u16*)(staging + (r + 8) * 128 + at) = pack_e4m3(sum[0][i * 4 + 2] * inverse1, sum[0][i * 4 + 3] * inverse1);
  }
  flush(out.to + unit.n * 128, N_OUT, 128);
#else
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    float (&from)[ACC] = sum[part / 2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = ((part & 1) * 8 + i) * 4, at = (i ^ r) * 16 + quad * 4;
      *(u32*)(staging + r * 128 + at) = pack_bf16(from[j], from[j + 1]);
      *(u32*)(staging + (r + 8) * 128 + at) = pack_bf16(from[j + 2], from[j + 3]);
    }
    const int n = unit.n * 256 + part * 64;
    flush(out.to + n * 2, N_OUT * 2, (N_OUT - n) * 2);
  }
#endif
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_grouped_gemm(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ XMaps x_maps,
    const float* __restrict__ w_scale, const float* x_scale, const int4* __restrict__ tiles,
    const int* __restrict__ tile_count, u8* __restrict__ out, float* __restrict__ out_scale,
    int scale_stride, int* units_taken) {
  extern __shared__ __align__(1024) u8 smem[];
  const u32 base = smem_address(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int rank = blockIdx.x % SPLIT;
  const int first_unit = blockIdx.x / SPLIT, unit_stride = gridDim.x / SPLIT;
  const int k_begin = KBLOCKS * rank / SPLIT, k_end = KBLOCKS * (rank + 1) / SPLIT;
  auto full = [&](u32 s) { return base + OFF_FULL + s * 8; };
  auto empty = [&](u32 s) { return base + OFF_EMPTY + s * 8; };

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full(s), 2);
      barrier_init(empty(s), MATH_THREADS / 32);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(base + OFF_QUEUE + 16 + i * 8, 1);
      barrier_init(base + OFF_QUEUE + 32 + i * 8, MATH_THREADS / 32 + 1);
    }
    barrier_init(base + OFF_SPLIT, (SPLIT - 1) * MATH_THREADS + (SPLIT == 1));
    barrier_init(base + OFF_SPLIT + 8, MATH_THREADS);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  if (SPLIT > 1) cluster_sync(); else __syncthreads();

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 8 && lane == 0) {
      auto load_weights = [&](const Unit& unit, int k, u32 s) {
        barrier_expect(full(s), W_BYTES + class_of(unit.rows) * 128);
        const int row = unit.expert * W_ROWS + unit.n * (GATED ? 128 : 256);
        const u32 to = base + s * W_BYTES;
        const int second = row + (GATED ? N_OUT : 128);
        if (unit.alone) {
          load_2d_streaming(to, &w_map, k * 128, row, full(s));
          load_2d_streaming(to + W_BYTES / 2, &w_map, k * 128, second, full(s));
        } else {
          load_2d(to, &w_map, k * 128, row, full(s));
          load_2d(to + W_BYTES / 2, &w_map, k * 128, second, full(s));
        }
      };
      int ahead = 0;
      if (!EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
      const int units = *tile_count * UNITS_N;
      if (EARLY) {
        if (first_unit < units) {
          const Unit unit = unit_of(tiles, first_unit);
          for (; ahead < STAGES && ahead < k_end - k_begin; ++ahead) load_weights(unit, k_begin + ahead, ahead);
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
      }
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      u32 s = 0, parity = 1;
      Queue queue(base);
      int u = first_unit;
      while (u < units) {
        queue.push(u);
        // A cluster would have to agree; its units are few and alike.
        const int next = SPLIT > 1 ? u + unit_stride : unit_stride + atomicAdd(units_taken, 1);
        const Unit unit = unit_of(tiles, u);
        const TensorMap* x_map = &x_maps.of[map_of(class_of(unit.rows))];
        for (int k = k_begin; k < k_end; ++k) {
          if (ahead > 0) {
            --ahead;
          } else {
            barrier_wait(empty(s), parity);
            load_weights(unit, k, s);
          }
          load_2d(base + OFF_X + s * X_BYTES, x_map, k * 128, unit.row, full(s));
          if (++s == STAGES) s = 0, parity ^= 1;
        }
        u = next;
      }
      queue.push(-1);
    } else if (warp == 9) {
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
      u32 s = 0, parity = 1;
      Queue queue(base);
      for (int u = queue.pop(lane); u >= 0; u = queue.pop(lane)) {
        const Unit unit = unit_of(tiles, u);
        int row = GATED ? unit.n + (lane & 1) * (N_OUT / 128) : unit.n * 2 + (lane & 1);
        row = min(row, W_SCALE_ROWS - 1);
        const float* w_from = w_scale + ((long long)unit.expert * W_SCALE_ROWS + row) * KBLOCKS;
        const float* x_from = x_scale + unit.row + lane;
        constexpr int LOADS = (ROWS + 31) / 32;
        float w = 0.f, x[LOADS];
        auto load = [&](int k) {
          w = __ldg(w_from + k);
#pragma unroll
          for (int i = 0; i < LOADS; ++i)
            x[i] = i * 32 + lane < unit.rows ? __ldcg(x_from + (long long)k * scale_stride + i * 32) : 0.f;
        };
        load(k_begin);
        for (int k = k_begin; k < k_end; ++k) {
          float* to = (float*)(smem + OFF_SCALE + s * SCALE_PITCH) + lane;
          barrier_wait(empty(s), parity);
#pragma unroll
          for (int i = 0; i < LOADS; ++i)
            if (i * 32 + lane < ROWS) to[i * 32] = x[i];
          if (lane < 2) *(float*)(smem + OFF_W_SCALE + s * 8 + lane * 4) = w;
          __syncwarp();
          if (lane == 0) barrier_arrive(full(s));
          if (k + 1 < k_end) load(k + 1);
          if (++s == STAGES) s = 0, parity ^= 1;
        }
      }
    } else {
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
    const Output output{out, out_scale, scale_stride};
    Ring ring;
    u32 split_parity = 0;
    Queue queue(base);
    for (int u = queue.pop(lane); u >= 0; u = queue.pop(lane)) {
      const Unit unit = unit_of(tiles, u);
#define FEW_ROWS(N) case N: few_rows<N>(smem, base, unit, k_begin, k_end, rank, ring, split_parity, output); break
      switch (class_of(unit.rows)) {
#if ROWS == 8
        FEW_ROWS(8);
#else
        FEW_ROWS(16);
#endif
#if ROWS >= 32
        FEW_ROWS(32);
#endif
#if ROWS >= 64
        FEW_ROWS(64);
#endif
#if ROWS >= 128
        case 128: many_rows(smem, base, unit, ring, output); break;
#endif
      }
    }
  }
  // No CTA of a cluster may end while another still writes to it.
  if (SPLIT > 1) cluster_sync();
}
