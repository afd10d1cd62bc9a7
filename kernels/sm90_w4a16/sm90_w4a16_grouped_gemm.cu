// Grouped GEMM of bfloat16 rows with NVFP4 or MXFP4 weights, for SM90.
//
//   y[r, n] = factor[e] * sum over k of  x[r, k] * w[e, n, k]
//
// for the rows r of expert e. w is bfloat16: a code times the scale of its 16 or 32 columns, which is exact, as both
// together have at most six significant bits. Sums are float32. A bias is added behind. ACTIVATED: out is an activation
// function of y; GATED: n runs over gate and up rows, and it is act(gate) * up. Out is bfloat16.
//
// Weights are the M of WGMMA and come from registers, tokens are its N, a multiple of 8. layout.py says how codes and
// scales lie in a panel of 128 weight rows x 128 k; pipeline.cuh has the loop over units of work, schedule.cuh what CTAs
// and warps share, panels.cuh how weights come, bf16_output.cuh how results go. The N of the instruction is the smallest
// class of the tile's rows.
//
// Compile-time, beside the classes and what schedule.cuh has: ACTIVATED, GATED, ACT, LIMITED, BIAS, N_OUT (columns of
// out), W_ROWS (weight rows an expert), NVFP4.

#include "sm90/ptx.cuh"
#include "sm90/panel_codes.cuh"

constexpr int SCALE_WARPS = 0, X_PARTS = 2;
constexpr int MATH_REGISTERS = GATHER > 0 ? 224 : 232, OTHER_REGISTERS = GATHER > 0 ? 56 : 40;  // of a thread
constexpr int SCALES = NVFP4 ? 2 : 1;  // words of scales of a row's 128 columns, a byte each
constexpr u32 PANEL_BYTES = CODE_BYTES + 512 * SCALES;
constexpr u32 W_BYTES = 2 * PANEL_BYTES;
constexpr u32 X_PART_BYTES = ROWS * 128, X_BYTES = X_PARTS * X_PART_BYTES;
constexpr u32 OFF_X = 0;
constexpr u32 OFF_W = STAGES * X_BYTES;
constexpr u32 OFF_FULL = OFF_W + STAGES * W_BYTES;
constexpr u32 SCRATCH_BYTES = 0;

//CLASSES

#include "sm90/schedule.cuh"
#include "sm90/activation.cuh"
#include "sm90/panels.cuh"

// Both halves of `x` times the low or the high half of `by`.
template <int HIGH>
__device__ __forceinline__ u32 times(u32 x, u32 by) {
  u32 out;
  if constexpr (HIGH)
    asm("{\n.reg .b16 low, high;\n.reg .b32 twice;\nmov.b32 {low, high}, %2;\nmov.b32 twice, {high, high};\n"
        "mul.rn.bf16x2 %0, %1, twice;\n}" : "=r"(out) : "r"(x), "r"(by));
  else
    asm("{\n.reg .b16 low, high;\n.reg .b32 twice;\nmov.b32 {low, high}, %2;\nmov.b32 twice, {low, low};\n"
        "mul.rn.bf16x2 %0, %1, twice;\n}" : "=r"(out) : "r"(x), "r"(by));
  return out;
}
// Scales 0 and 2 of `word`, or 1 and 3, as bfloat16: exponent and mantissa of NVFP4's, the exponent of MXFP4's.
__device__ __forceinline__ u32 scales_of(u32 word, bool odd) {
  if (odd) word = __funnelshift_r(word, word, 8);
  if (!NVFP4) return word & 0x7F807F80;
  u32 out;  // (word & mask) | exponent
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(0x0FF00FF0), "r"(0x70007000));
  return out;
}

// What a thread reads of a block of 64 weight rows x 128 k: 64 codes, and the scales of its two rows.
struct Packed {
  uint4 codes[2];
  u32 scale[2][SCALES];
  __device__ __forceinline__ void load(const u8* panel, int block) {
    const int thread = threadIdx.x & 127;
    load_codes(codes, panel, block, thread);
    const u8* from = panel + CODE_BYTES + (thread / 4 * 2 + block) * 8 * SCALES;
    if constexpr (SCALES == 2) {
      const uint4 all = *(const uint4*)from;
      scale[0][0] = all.x, scale[0][SCALES - 1] = all.y, scale[1][0] = all.z, scale[1][SCALES - 1] = all.w;
    } else {
      const uint2 all = *(const uint2*)from;
      scale[0][0] = all.x, scale[1][0] = all.y;
    }
  }
  // 16 columns, to the A operand of one WGMMA. The three bits of a magnitude, as the lowest of a bfloat16's exponent
  // and the highest of its mantissa, stand for the code times 2 ** -126.
  template <int HIGH>
  __device__ __forceinline__ static void decode_16(u32 word, u32 by_low, u32 by_high, u32* a) {
    a[0] = times<HIGH>(word & 0x81C081C0, by_low);
    a[1] = times<HIGH>(word * 64 & 0x81C081C0, by_high);
    a[2] = times<HIGH>((word * 16 ^ word >> 4) & 0x81C081C0, by_low);
    a[3] = times<HIGH>(__funnelshift_r(word, word, 6) & 0x81C081C0, by_high);
  }
  template <int HALF, int STEP>
  __device__ __forceinline__ u32& word() { return STEP == 0 ? codes[HALF].x : STEP == 1 ? codes[HALF].y : STEP == 2 ? codes[HALF].z : codes[HALF].w; }
  // Columns 16 * STEP on of either half.
  template <int HALF, int STEP>
  __device__ __forceinline__ void decode(u32* a) {
    constexpr int OF = SCALES == 2 ? HALF : 0, HIGH = SCALES == 2 ? STEP / 2 : HALF;
    constexpr bool ODD = SCALES == 2 ? STEP % 2 : STEP / 2;
    decode_16<HIGH>(word<HALF, STEP>(), scales_of(scale[0][OF], ODD), scales_of(scale[1][OF], ODD), a);
  }
  template <int HALF>
  __device__ __forceinline__ void decode_half(u32 (&a)[16]) {
    decode<HALF, 0>(a);
    decode<HALF, 1>(a + 4);
    decode<HALF, 2>(a + 8);
    decode<HALF, 3>(a + 12);
  }
};

// d += 64 weight rows x ACC * 2 tokens over 64 k.
template <int ACC>
__device__ __forceinline__ void start(float (&d)[ACC], const u32 (&a)[16], u32 x) {
  const u64 b = descriptor(x);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(d, a + k * 4, b + 2 * k, 1);
  wgmma_commit();
}

// The factors of an expert's gate and up, or of its one matrix, twice.
struct Factors {
  float2 of;
  __device__ __forceinline__ Factors(const float* factor, int expert) {
    of.x = __ldg(factor + (GATED ? 2 : 1) * expert);
    of.y = GATED ? __ldg(factor + 2 * expert + 1) : of.x;
  }
  __device__ __forceinline__ float2 get(int, int) const { return of; }
  __device__ __forceinline__ static float of_one(float2 of, int block, int) { return block ? of.y : of.x; }
};

// The sums of a unit of at most 48 rows: half a block of weights, 64 rows x 64 k, is decoded while another is multiplied.
// Not of a pair, whose release amid products has ptxas wait for each of them.
template <int ACC>
__device__ __forceinline__ void multiply_small(float (&sum)[2][ACC], Worker& at, const Stages& stages) {
  Ring& ring = at.ring;
  u32 a[2][16];
  Packed packed[2];
  auto load = [&](int block) { packed[block].load(stages.panel(ring.stage), block); };
  auto empty = [&](u32 s) { return at.base + OFF_EMPTY + s * 8; };
  u32 last = 0;
  for (int k = at.k_begin; k < at.k_end; ++k) {
    const u32 s = ring.stage, x = stages.x(s);
    stages.await(ring);
    load(0);
    load(1);
    wgmma_wait<1>();
    packed[0].decode_half<0>(a[0]);
    start(sum[0], a[0], x);
    wgmma_wait<1>();
    if (k > at.k_begin) release(empty(last));
    packed[0].decode_half<1>(a[1]);
    start(sum[0], a[1], x + X_PART_BYTES);
    wgmma_wait<1>();
    packed[1].decode_half<0>(a[0]);
    start(sum[1], a[0], x);
    wgmma_wait<1>();
    packed[1].decode_half<1>(a[1]);
    start(sum[1], a[1], x + X_PART_BYTES);
    last = s;
    ring.next();
  }
  wgmma_wait<0>();
  if (at.k_begin < at.k_end) release(empty(last));  // a part of a short K may be empty
}

// A step of 16 k, decoded when the step that had its registers four before is done.
template <int HALF, int STEP, int ACC>
__device__ __forceinline__ void multiply_step(float (&sum)[ACC], u32 (&a)[16], Packed& packed, u64 x) {
  wgmma_wait<3>();
  asm volatile("" : "+r"(packed.word<HALF, STEP>()));  // not before the wait
  packed.decode<HALF, STEP>(a + STEP * 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[STEP * 4 + i]));  // nor behind the fence
  wgmma_fence();
  wgmma(sum, a + STEP * 4, x + 2 * STEP, 1);
  wgmma_commit();
}
template <int HALF, int ACC>
__device__ __forceinline__ void multiply_half(float (&sum)[ACC], u32 (&a)[16], Packed& packed, u32 x) {
  const u64 b = descriptor(x + HALF * X_PART_BYTES);
  multiply_step<HALF, 0>(sum, a, packed, b);
  multiply_step<HALF, 1>(sum, a, packed, b);
  multiply_step<HALF, 2>(sum, a, packed, b);
  multiply_step<HALF, 3>(sum, a, packed, b);
}

// The sums of a unit of more rows, for which a warpgroup has registers for the operands of four steps.
template <int ACC>
__device__ __forceinline__ void multiply_large(float (&sum)[2][ACC], Worker& at, const Stages& stages) {
  Ring& ring = at.ring;
  u32 a[16];
  Packed packed;
  stages.await(ring);
  packed.load(stages.panel(ring.stage), 0);
  for (int k = 0; k < KBLOCKS; ++k) {
    const u32 s = ring.stage, x = stages.x(s);
    multiply_half<0>(sum[0], a, packed, x);
    multiply_half<1>(sum[0], a, packed, x);
    packed.load(stages.panel(s), 1);
    multiply_half<0>(sum[1], a, packed, x);
    multiply_half<1>(sum[1], a, packed, x);
    ring.next();
    if (k + 1 < KBLOCKS) {
      stages.await(ring);
      packed.load(stages.panel(ring.stage), 0);
    }
    wgmma_wait<0>();
    release(at.base + OFF_EMPTY + s * 8);
  }
}

// A unit of at most N rows: its sums, then its part of the output.
template <int N>
__device__ __forceinline__ void run_unit(const Unit& unit, Worker& at, const float* factor, const Output& out) {
  constexpr int ACC = N / 2;
  const int lane = threadIdx.x & 31, group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const Factors factors(factor, unit.expert);
  float sum[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;
  pin(sum[0]), pin(sum[1]);
  const Stages stages{at, group};
  if constexpr (N <= 48 && PAIR == 1) multiply_small(sum, at, stages);
  else multiply_large(sum, at, stages);
  pin(sum[0]), pin(sum[1]);
  if (add_splits<N>(sum, at)) finish<N>(sum, factors, unit, out);
}

#include "sm90/pipeline.cuh"

struct W4a16 {
  const u8* w;
  const XMaps& x_maps;
  const float* factor;
  Output out;

  __device__ __forceinline__ void load_weights(const Unit& unit, int k, u32 base, u32 s, int rank, u32 bar) const {
    load_panels(w, unit, k, base + OFF_W + s * W_BYTES, rank, bar);
  }
  __device__ __forceinline__ void load_x(const Unit& unit, const TensorMap* map, int k, u32 base, u32 s, u32 bar) const {
#pragma unroll
    for (int part = 0; part < X_PARTS; ++part)
      load_2d(base + OFF_X + s * X_BYTES + part * X_PART_BYTES, map, (k * X_PARTS + part) * 128, unit.row, bar);
  }
  template <int N>
  __device__ __forceinline__ void run_unit(const Unit& unit, Worker& at) const {
    ::run_unit<N>(unit, at, factor, out);
  }
  __device__ __forceinline__ void end(int) const {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sm90_w4a16_grouped_gemm(
    const int4* tiles, const int* tile_count, int* units_taken, const u8* x, const float* x_scale, const int* pair_of_row,
    u16* __restrict__ out, const float* __restrict__ bias, const ActParameters act, const __grid_constant__ Routing routing,
    const __grid_constant__ XMaps x_maps, const u8* __restrict__ w, const float* __restrict__ factor) {
  extern __shared__ __align__(1024) u8 smem[];
  W4a16 family{w, x_maps, factor, {out, bias, act}};
  grouped_gemm(family, {tiles, tile_count, units_taken, x, pair_of_row}, routing, smem);
}
