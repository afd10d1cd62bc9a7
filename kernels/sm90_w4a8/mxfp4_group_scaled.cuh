// A panel of MXFP4 weights with an E8M0 scale for each group, as mxfp4_group_scaled_layout.py packs it. It differs from
// what mxfp4.cuh reads in the word of scales alone.

// An E8M0 scale as float32: a subnormal for byte 0, NaN for 255.
__device__ __forceinline__ float e8m0(u32 byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : byte << 23);
}

struct GroupScaled {
  Packed packed;
  __device__ __forceinline__ void load(const u8* panel, int block) { packed.load(panel, block); }
  // Every group has the exponent of a row's largest: codes stand for code * 64.
  __device__ __forceinline__ void decode(u32 (&a)[16], int step) const {
    packed.decode_with(a, step, magnitudes(12), magnitudes(12));
  }
  // Of group `step`, rows lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ float2 scales(int step) const {
    return {e8m0(packed.scale.x >> 8 * step & 255), e8m0(packed.scale.y >> 8 * step & 255)};
  }
};
