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
// A persistent CTA works through units, the next free one each time: a tile of rows (a run of at most ROWS rows of
// one expert) times two panels. One thread fills a ring of shared-memory stages by TMA, and two warpgroups
// multiply, each by a panel: its two blocks are gate and up of the same columns if GATED. The N of the instruction
// is the smallest class of the tile's rows.
// SPLIT CTAs of a cluster share a unit along K; the first adds up their sums, in their order.
// PAIR = 2: the CTAs of a cluster have two tiles of one expert and the same panels; each loads one for both.
// GATHER = top-k: `x` and `x_scale` are of tokens, not of rows; two warps copy the tokens of a tile's rows.
//
// Compile-time: ROWS and the classes, ACTIVATED, GATED, ACT, LIMITED, BIAS, STAGES, SPLIT, PAIR, GATHER, K,
// KBLOCKS (ceil(K / 128)), UNITS_N (units along n), PANELS (of an expert), N_OUT (columns of out), W_ROWS (weight
// rows an expert), EARLY (weights do not wait for the kernel in front), ROUTED (the tiles are made here, from the
// ids).

#include "sm90/ptx.cuh"

constexpr int THREADS = 384;
constexpr int MATH_THREADS = 256;
constexpr int GATHER_WARPS = GATHER > 0 ? 2 : 0;
constexpr int MATH_REGISTERS = GATHER > 0 ? 224 : 232, OTHER_REGISTERS = GATHER > 0 ? 56 : 40;  // of a thread
constexpr u32 CODE_BYTES = 8192, PANEL_BYTES = CODE_BYTES + 256;
constexpr u32 W_BYTES = 2 * PANEL_BYTES;
constexpr u32 X_BYTES = ROWS * 128;
constexpr u32 OFF_W = STAGES * X_BYTES;
constexpr u32 OFF_FULL = OFF_W + STAGES * W_BYTES;
constexpr u32 OFF_EMPTY = OFF_FULL + STAGES * 8;
constexpr u32 OFF_SPLIT = OFF_EMPTY + STAGES * 8;  // two barriers
constexpr int CLUSTER = SPLIT * PAIR;
constexpr u32 OFF_QUEUE = (OFF_SPLIT + 16 + 127) / 128 * 128;  // two units, their full and empty barriers
constexpr u32 OFF_CHOICE = OFF_QUEUE + 64;  // two numbers of units, the same
constexpr u32 OFF_PARTIAL = OFF_QUEUE + 128;
constexpr u32 OFF_TILES = OFF_PARTIAL + (SPLIT - 1) * ROWS * MATH_THREADS * 4;  // and their number
constexpr int ROUTED_SLOTS = 32;
constexpr int SWAP_ROWS = 64;  // most rows of a last tile that is not paired
constexpr float CODE_UNIT = 256.f;  // the E4M3 bits of a code stand for code / 256
static_assert(SPLIT == 1 || ROWS <= 32, "split sums do not fit");

//CLASSES
//WGMMA

#include "sm90/schedule.cuh"
#include "sm90/activation.cuh"

struct XMaps { TensorMap of[CLASSES]; };  // boxes of the rows of each class

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

struct Inputs { const float* x_scale; const int* slot_of_row; };

// A unit of at most N rows: its sums, then its part of the output.
template <int N>
__device__ __forceinline__ void run_unit(u8* smem, u32 base, const Unit& unit, int k_begin, int k_end, int rank, Ring& ring, u32& split_parity, const Inputs& in, const Output& out) {
  constexpr int ACC = N / 2;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int group = warp / 4;
  TokenScales<N> scales;
  scales.load(in.x_scale, in.slot_of_row, unit, lane);
  float sum[2][ACC], d[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;
  u32 a[2][16];
  float2 by[2];
  Packed packed;
  auto load = [&](int block) { packed.load(smem + OFF_W + ring.stage * W_BYTES + group * PANEL_BYTES, block); };
  auto await_stage = [&]() {
    barrier_wait(base + OFF_FULL + ring.stage * 8, ring.parity);
    if (GATHER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    load(0);
  };
  if (k_begin < k_end) await_stage();  // a part of a short K may be empty
  for (int k = k_begin; k < k_end; ++k) {
    const u32 s = ring.stage, x = base + s * X_BYTES;
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

#if SPLIT > 1
  // 16 bytes a thread side by side, for either half of a cluster's sums.
  constexpr u32 PITCH = MATH_THREADS * 16, BYTES = N * MATH_THREADS * 4;
  const u32 sums_in = base + OFF_SPLIT, sums_out = base + OFF_SPLIT + 8;
  if (rank > 0) {
    barrier_wait(sums_out, split_parity ^ 1);
    const u32 to = address_in(base + OFF_PARTIAL + (rank - 1) * BYTES + threadIdx.x * 16, 0);
#pragma unroll
    for (int i = 0; i < N; i += 4) store_in(to + i / 4 * PITCH, &sum[i / ACC][i % ACC], address_in(sums_in, 0));
    split_parity ^= 1;
    return;
  }
  if (threadIdx.x == 0) barrier_expect(sums_in, (SPLIT - 1) * BYTES);
  barrier_wait(sums_in, split_parity);
#pragma unroll
  for (int other = 0; other < SPLIT - 1; ++other) {
    const u8* from = smem + OFF_PARTIAL + other * BYTES + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 x = *(const float4*)(from + i / 4 * PITCH);
      sum[i / ACC][i % ACC] += x.x;
      sum[i / ACC][i % ACC + 1] += x.y;
      sum[i / ACC][i % ACC + 2] += x.z;
      sum[i / ACC][i % ACC + 3] += x.w;
    }
  }
  __syncwarp();
  if (lane == 0)
    for (int other = 1; other < SPLIT; ++other) barrier_arrive_in(address_in(sums_out, other));
  split_parity ^= 1;
#endif

  finish<N>(sum, scales, unit, out);
}

#include "sm90/routing.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) w4a8_grouped_gemm(
    const u8* __restrict__ w, const __grid_constant__ XMaps x_maps, const float* x_scale, const int4* tiles,
    const int* tile_count, u16* __restrict__ out, int* units_taken, const float* __restrict__ bias,
    const ActParameters act, const __grid_constant__ Routing routing, const u8* x, const int* slot_of_row) {
  extern __shared__ __align__(1024) u8 smem[];
  const u32 base = smem_address(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int rank = blockIdx.x % CLUSTER;
  const int first_unit = blockIdx.x / CLUSTER, unit_stride = gridDim.x / CLUSTER;
  const int k_begin = SPLIT > 1 ? KBLOCKS * rank / SPLIT : 0, k_end = SPLIT > 1 ? KBLOCKS * (rank + 1) / SPLIT : KBLOCKS;
  auto full = [&](u32 s) { return base + OFF_FULL + s * 8; };
  auto empty = [&](u32 s) { return base + OFF_EMPTY + s * 8; };

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full(s), 1 + 32 * GATHER_WARPS);
      barrier_init(empty(s), PAIR * MATH_THREADS / 32);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(base + OFF_QUEUE + 32 + i * 8, 1);
      barrier_init(base + OFF_QUEUE + 48 + i * 8, MATH_THREADS / 32 + GATHER_WARPS);
      barrier_init(base + OFF_CHOICE + 16 + i * 8, 1);
      barrier_init(base + OFF_CHOICE + 32 + i * 8, 1);
    }
    barrier_init(base + OFF_SPLIT, 1);
    barrier_init(base + OFF_SPLIT + 8, MATH_THREADS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
#if ROUTED
  // What is in front of the kernel in front has ended: that lets this one start only then.
  tiles = (const int4*)(smem + OFF_TILES);
  tile_count = (const int*)(smem + OFF_TILES + ROUTED_SLOTS * 16);
  if (warp == 11) make_tiles(routing, (int4*)tiles, (int*)tile_count, lane);
  __syncthreads();
#endif
  if (CLUSTER > 1) cluster_sync(); else __syncthreads();

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
    if (warp == 8 && lane == 0) {
      auto load_weights = [&](const Unit& unit, int k, u32 s) {
        const bool second = unit.n * 2 + 1 < PANELS;
        const u32 x_rows = GATHER ? 0 : rows_of(class_of(unit.rows));
        barrier_expect(full(s), (second ? W_BYTES : PANEL_BYTES) + x_rows * 128);
        const u8* from = w + (((long long)unit.expert * PANELS + unit.n * 2) * KBLOCKS + k) * PANEL_BYTES;
        const u32 to = base + OFF_W + s * W_BYTES;
        constexpr long long NEXT = (long long)KBLOCKS * PANEL_BYTES;
#if PAIR > 1
        if (unit.shared) {
          if (second || rank == 0) load_bulk_pair(to + rank * PANEL_BYTES, from + rank * NEXT, PANEL_BYTES, full(s));
          return;
        }
#endif
        if (unit.alone) {
          load_bulk_streaming(to, from, PANEL_BYTES, full(s));
          if (second) load_bulk_streaming(to + PANEL_BYTES, from + NEXT, PANEL_BYTES, full(s));
        } else {
          load_bulk(to, from, PANEL_BYTES, full(s));
          if (second) load_bulk(to + PANEL_BYTES, from + NEXT, PANEL_BYTES, full(s));
        }
      };
      int ahead = 0;
      if (!EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
      const int units = *tile_count * UNITS_A_TILE;
      if (EARLY) {
        if (first_unit < units) {
          const Unit unit = unit_of(tiles, first_unit, rank);
          for (; ahead < STAGES && ahead < k_end - k_begin; ++ahead) load_weights(unit, k_begin + ahead, ahead);
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
      }
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      u32 s = 0, parity = 1;
      Queue queue(base);
      Choice choice(base);
      for (int u = first_unit; u < units;) {
        const Unit unit = unit_of(tiles, u, rank);
        int next = u + unit_stride;
        // SPLIT CTAs would have to agree; their units are few and alike.
        if (SPLIT == 1 && rank == 0) next = unit_stride + atomicAdd(units_taken, 1);
        queue.push(unit);
        const TensorMap* x_map = &x_maps.of[class_of(unit.rows)];
        for (int k = k_begin; k < k_end; ++k) {
          if (ahead > 0) {
            --ahead;
          } else {
            barrier_wait(empty(s), parity);
            load_weights(unit, k, s);
          }
          if (!GATHER) load_2d(base + s * X_BYTES, x_map, k * 128, unit.row, full(s));
          if (++s == STAGES) s = 0, parity ^= 1;
          if (PAIR > 1 && rank == 0 && k == k_begin) choice.send(next);
        }
        u = PAIR > 1 && rank > 0 ? choice.receive() : next;
      }
      queue.push({0, 0, -1, 0});
    } else {
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#if GATHER
      // A warp copies every second four rows of a tile, a lane 16 bytes of each.
      if (warp >= 10) {
        const int odd = warp - 10, chunk = lane & 7, row_of_four = lane / 8;
        const u32 to = base + odd * 512 + row_of_four * 128 + (chunk ^ (odd * 4 + row_of_four)) * 16;
        u32 s = 0, parity = 1;
        Queue queue(base);
        for (Unit unit = queue.pop(lane); unit.rows >= 0; unit = queue.pop(lane)) {
          const int rows = rows_of(class_of(unit.rows));
          u32 token_at[ROWS / 8];
#pragma unroll
          for (int i = 0; i < ROWS / 8; ++i) {
            const int row = i * 8 + odd * 4 + row_of_four;
            token_at[i] = 0;
            if (i * 8 < rows) token_at[i] = (u32)(__ldcg(slot_of_row + unit.row + min(row, max(unit.rows - 1, 0))) / GATHER) * (u32)K;
          }
          for (int k = 0; k < KBLOCKS; ++k) {
            const int column = k * 128 + chunk * 16;
            const bool within = column < K;
            const u8* from = x + (within ? column : 0);
            barrier_wait(empty(s), parity);
#pragma unroll
            for (int i = 0; i < ROWS / 8; ++i)
              if (i * 8 < rows) copy_16(to + s * X_BYTES + i * 1024, from + token_at[i], within ? 16 : 0);
            copies_arrive(full(s));
            if (++s == STAGES) s = 0, parity ^= 1;
          }
        }
      }
#endif
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGISTERS));
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
    const Inputs in{x_scale, slot_of_row};
    const Output output{out, bias, act};
    Ring ring;
    u32 split_parity = 0;
    Queue queue(base);
    for (Unit unit = queue.pop(lane); unit.rows >= 0; unit = queue.pop(lane)) {
#define RUN(INDEX, N) case INDEX: run_unit<N>(smem, base, unit, k_begin, k_end, rank, ring, split_parity, in, output); break;
      switch (class_of(unit.rows)) { EACH_CLASS(RUN) }
    }
  }
  // No CTA of a cluster may end while another still writes to it.
  if (CLUSTER > 1) cluster_sync();
}
