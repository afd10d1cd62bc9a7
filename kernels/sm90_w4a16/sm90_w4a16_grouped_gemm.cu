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

constexpr int SCALE_WARPS = 0, X_PARTS = 2;
constexpr int MATH_REGISTERS = GATHER > 0 ? 224 : 232, OTHER_REGISTERS = GATHER > 0 ? 56 : 40;  // of a thread
constexpr int PANELS = (N_OUT + (GATED ? 63 : 127)) / (GATED ? 64 : 128);  // of an expert, the last perhaps half full
constexpr int SCALES = NVFP4 ? 2 : 1;  // words of scales of a row's 128 columns, a byte each
constexpr u32 CODE_BYTES = 8192, PANEL_BYTES = CODE_BYTES + 512 * SCALES;
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
// Bytes 0 and 2 of `word`, or 1 and 3, as bfloat16 scales: exponent and mantissa of NVFP4's, the exponent of MXFP4's.
__device__ __forceinline__ u32 scales_of(u32 word, bool odd) {
  if (!NVFP4) return (odd ? word >> 1 : word << 7) & 0x7F807F80;
  u32 out;  // (x & mask) | exponent
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(odd ? word >> 4 : word << 4), "r"(0x0FF00FF0), "r"(0x70007000));
  return out;
}

// What a thread reads of a block of 64 weight rows x 128 k: 64 codes, and the scales of its two rows.
struct Packed {
  uint4 codes[2];
  u32 scale[2][SCALES];
  __device__ __forceinline__ void load(const u8* panel, int block) {
    const int thread = threadIdx.x & 127;
    codes[0] = *(const uint4*)(panel + block * (CODE_BYTES / 2) + thread * 16);
    codes[1] = *(const uint4*)(panel + block * (CODE_BYTES / 2) + 2048 + thread * 16);
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
    a[1] = times<HIGH>(word * 8 & 0x81C081C0, by_high);
    a[2] = times<HIGH>((word * 64 & 0x01C001C0) | (word * 4 & 0x80008000), by_low);
    a[3] = times<HIGH>((word >> 3 & 0x01C001C0) | (word * 2 & 0x80008000), by_high);
  }
  template <int HALF>
  __device__ __forceinline__ void decode(u32 (&a)[16]) const {
    const uint4 words = codes[HALF];
    const u32 low = scale[0][SCALES == 2 ? HALF : 0], high = scale[1][SCALES == 2 ? HALF : 0];
    const u32 even[2] = {scales_of(low, false), scales_of(high, false)}, odd[2] = {scales_of(low, true), scales_of(high, true)};
    if constexpr (SCALES == 2) {
      decode_16<0>(words.x, even[0], even[1], a);
      decode_16<0>(words.y, odd[0], odd[1], a + 4);
      decode_16<1>(words.z, even[0], even[1], a + 8);
      decode_16<1>(words.w, odd[0], odd[1], a + 12);
    } else {
      decode_16<HALF>(words.x, even[0], even[1], a);
      decode_16<HALF>(words.y, even[0], even[1], a + 4);
      decode_16<HALF>(words.z, odd[0], odd[1], a + 8);
      decode_16<HALF>(words.w, odd[0], odd[1], a + 12);
    }
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

// A unit of at most N rows: its sums, then its part of the output. Half a block of weights, 64 rows x 64 k, is decoded
// while another is multiplied.
template <int N>
__device__ __forceinline__ void run_unit(const Unit& unit, Worker& at, const float* factor, const Output& out) {
  constexpr int ACC = N / 2;
  const int lane = threadIdx.x & 31, group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  Ring& ring = at.ring;
  const Factors factors(factor, unit.expert);
  float sum[2][ACC];
#pragma unroll
  for (int i = 0; i < ACC; ++i) sum[0][i] = sum[1][i] = 0.f;
  u32 a[2][16];
  Packed packed[2];
  pin(sum[0]), pin(sum[1]);
  auto load = [&](int block) { packed[block].load(at.smem + OFF_W + ring.stage * W_BYTES + group * PANEL_BYTES, block); };
  auto await_stage = [&]() {
    barrier_wait(at.base + OFF_FULL + ring.stage * 8, ring.parity);
    see_copies();
  };
  auto empty = [&](u32 s) { return at.base + OFF_EMPTY + s * 8; };
  if (at.k_begin < at.k_end) {  // a part of a short K may be empty
    await_stage();
    load(0);
    if constexpr (N > 48) {  // registers for one operand; the other warpgroup multiplies meanwhile
      for (int k = at.k_begin; k < at.k_end; ++k) {
        const u32 s = ring.stage, x = at.base + OFF_X + s * X_BYTES;
        load(1);
        ring.next();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          packed[b].decode<0>(a[0]);
          start(sum[b], a[0], x);
          wgmma_wait<0>();
          packed[b].decode<1>(a[0]);
          start(sum[b], a[0], x + X_PART_BYTES);
          if (b == 1 && k + 1 < at.k_end) await_stage(), load(0);
          wgmma_wait<0>();
        }
        release(empty(s), lane);
      }
    } else {
      u32 last = 0;
      for (int k = at.k_begin; k < at.k_end; ++k) {
        const u32 s = ring.stage, x = at.base + OFF_X + s * X_BYTES;
        if (k > at.k_begin) await_stage(), load(0);
        load(1);
        wgmma_wait<1>();
        packed[0].decode<0>(a[0]);
        start(sum[0], a[0], x);
        wgmma_wait<1>();
        if (k > at.k_begin) release(empty(last), lane);
        packed[0].decode<1>(a[1]);
        start(sum[0], a[1], x + X_PART_BYTES);
        wgmma_wait<1>();
        packed[1].decode<0>(a[0]);
        start(sum[1], a[0], x);
        wgmma_wait<1>();
        packed[1].decode<1>(a[1]);
        start(sum[1], a[1], x + X_PART_BYTES);
        last = s;
        ring.next();
      }
      wgmma_wait<0>();
      release(empty(last), lane);
    }
  }
  pin(sum[0]), pin(sum[1]);
  if (add_splits<N>(sum, at)) finish<N>(sum, factors, unit, out);
}

#include "sm90/pipeline.cuh"

struct W4a16 {
  const u8* w;
  const XMaps& x_maps;
  const float* factor;
  Output out;

  __device__ __forceinline__ const TensorMap* x_map(const Unit& unit) const { return &x_maps.of[class_of(unit.rows)]; }
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
