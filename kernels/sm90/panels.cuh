// What families share whose weights are panels: the register operand of WGMMA, 128 weight rows x 128 k a piece, codes
// first. A unit is two panels, one for each warpgroup. A family defines PANEL_BYTES and the places of its stages before.

#include "sm90/bf16_output.cuh"

// The stages that a warpgroup reads.
struct Stages {
  const Worker& at;
  int group;
  __device__ __forceinline__ void await(const Ring& ring) const {
    barrier_wait(at.base + OFF_FULL + ring.stage * 8, ring.parity);
    see_copies();
  }
  __device__ __forceinline__ const u8* panel(u32 stage) const { return at.smem + OFF_W + stage * W_BYTES + group * PANEL_BYTES; }
  __device__ __forceinline__ u32 x(u32 stage) const { return at.base + OFF_X + stage * X_BYTES; }
};

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
