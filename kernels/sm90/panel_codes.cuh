// The codes of a panel: 128 weight rows x 128 k of four bits, in front of its scales.

constexpr int PANELS = (N_OUT + (GATED ? 63 : 127)) / (GATED ? 64 : 128);  // of an expert, the last perhaps half full
constexpr u32 CODE_BYTES = 8192;  // of a panel

// The 64 codes that a thread of a warpgroup reads of a block of 64 weight rows x 128 k.
__device__ __forceinline__ void load_codes(uint4 (&codes)[2], const u8* panel, int block, int thread) {
  codes[0] = *(const uint4*)(panel + block * (CODE_BYTES / 2) + thread * 16);
  codes[1] = *(const uint4*)(panel + block * (CODE_BYTES / 2) + 2048 + thread * 16);
}
