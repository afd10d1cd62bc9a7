// A panel of MXFP4 weights, as mxfp4_layout.py packs it, read and decoded.
//
// The E8M0 scales of a row become one float32 scale, that of the largest, and a difference of exponents for each group
// of 32, which decoding adds to those of the codes: E4M3 has room for eleven octaves.

constexpr u32 PANEL_BYTES = CODE_BYTES + 512;
constexpr float CODE_UNIT = 0.015625f;  // of the largest group, the E4M3 bits of a code stand for code * 64

__device__ __forceinline__ u32 select_bytes(uint2 table, u32 selector) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(table.x), "r"(table.y), "r"(selector));
  return out;
}

// Powers of two that the compiler does not know, or it would make shifts of the multiplications by them. Shifts take the
// units of LOP3 and PRMT, multiplications those of FFMA, which have less to do: calls take 1 % less time.
__constant__ u32 TO_TOP[3] = {1u << 12, 1u << 8, 1u << 4};  // brings the exponent of group 0, 1, 2 to the top of a word

// The exponent of a group: four bits of the high half of `scale`.
__device__ __forceinline__ u32 exponent_of(u32 scale, int group) {
  return (group == 3 ? scale : scale * TO_TOP[group]) >> 28;
}

// E4M3 bits of the eight magnitudes of E2M1, times 2 ** (exponent - 6), exponent from 1 to 12; 0 stays 0.
__device__ __forceinline__ uint2 magnitudes(u32 exponent) {
  return make_uint2(exponent * 0x08080800 + 0x0C080000, exponent * 0x08080808 + 0x1C181410);
}

// What a thread reads of a block of 64 weight rows x 128 k: 64 codes, and for each of its two rows the scale
// in the low half of a word and the exponents of the four groups in the high half.
struct Packed {
  uint4 codes[2];
  uint2 scale;
  __device__ __forceinline__ void load(const u8* panel, int block) {
    const int thread = threadIdx.x & 127;
    load_codes(codes, panel, block, thread);
    scale = *(const uint2*)(panel + CODE_BYTES + thread / 4 * 16 + block * 8);
  }
  // Keeps a step from being decoded before what is in front.
  __device__ __forceinline__ void pin(int step) {
    uint4& four = codes[step / 2];
    if (step & 1) asm volatile("" : "+r"(four.z), "+r"(four.w));
    else asm volatile("" : "+r"(four.x), "+r"(four.y));
  }
  // To the A operand of the WGMMA of columns 32 * step on, which are a group.
  __device__ __forceinline__ void decode(u32 (&a)[16], int step) const {
    const uint2 low = magnitudes(exponent_of(scale.x, step)), high = magnitudes(exponent_of(scale.y, step));
    decode_with(a, step, low, high);
  }
  // With the magnitudes of codes in the group of either row.
  __device__ __forceinline__ void decode_with(u32 (&a)[16], int step, uint2 low, uint2 high) const {
    const uint4 four = codes[step / 2];
    const u32 words[2] = {step & 1 ? four.z : four.x, step & 1 ? four.w : four.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 word = words[i], index = word & 0x77777777;
      a[step * 4 + i * 2] = select_bytes(low, index) | (word & 0x80808080);
      a[step * 4 + i * 2 + 1] = select_bytes(high, index >> 16) | (word * TO_TOP[2] & 0x80808080);  // word << 4
    }
  }
  // Scales of rows lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ float2 scales() const { return {__uint_as_float(scale.x << 16), __uint_as_float(scale.y << 16)}; }
};
