// A panel of INT4 weights, as int4_layout.py packs it, read and decoded.

constexpr u32 PANEL_BYTES = CODE_BYTES + 256;
constexpr float CODE_UNIT = 256.f;  // the E4M3 bits of a code stand for code / 256

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
    load_codes(codes, panel, block, thread);
    scale = *(const u32*)(panel + CODE_BYTES + thread / 4 * 8 + block * 4);
  }
  // To the A operand of the WGMMA of columns 32 * step on.
  __device__ __forceinline__ void decode(u32 (&a)[16], int step) const {
    const uint4 four = codes[step / 2];
    const u32 words[2] = {step & 1 ? four.z : four.x, step & 1 ? four.w : four.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[step * 4 + i * 2] = decode_4(words[i]);
      a[step * 4 + i * 2 + 1] = decode_4(words[i] >> 4);
    }
  }
  // Scales of rows lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ float2 scales() const { return {__uint_as_float(scale << 16), __uint_as_float(scale & 0xFFFF0000)}; }
};
