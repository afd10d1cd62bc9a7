struct Unit { int expert, row, rows, n; bool alone, shared; };

#if PAIR == 1
constexpr int UNITS_A_TILE = UNITS_N;
__device__ __forceinline__ Unit unit_of(const int4* tiles, int u, int rank) {
  const int q = u / UNITS_N;
  int4 tile = tiles[q];
  int n = u - q * UNITS_N;
  const int count = tile.w >> 16;
  if (count > 1) {  // the tiles of one expert share weights: run them side by side
    const int first = tile.w & 0xFFFF, local = u - first * UNITS_N;
    n = local / count;
    tile = tiles[first + local - n * count];
  }
  return {tile.x, tile.y, tile.z, n, count == 1, false};
}
#else
// Two tiles of an expert, one a CTA, share weights; of one that is left the CTAs have two units along n,
// as of a short last one, which would make its partner wait.
constexpr int UNITS_A_TILE = (UNITS_N + 1) / 2;
__device__ __forceinline__ Unit unit_of(const int4* tiles, int u, int rank) {
  int4 tile = tiles[u / UNITS_A_TILE];
  const int first = tile.w & 0xFFFF, count = tile.w >> 16;
  const int pairs = (count - (tiles[first + count - 1].z <= SWAP_ROWS)) / 2;
  int local = u - first * UNITS_A_TILE;
  if (local < pairs * UNITS_N) {
    const int n = local / pairs;
    tile = tiles[first + (local - n * pairs) * 2 + rank];
    return {tile.x, tile.y, tile.z, n, count == 2, true};
  }
  local -= pairs * UNITS_N;
  const int single = local / UNITS_A_TILE, n = (local - single * UNITS_A_TILE) * 2 + rank;
  const bool real = n < UNITS_N && pairs * 2 + single < count;
  tile = tiles[first + min(pairs * 2 + single, count - 1)];
  return {tile.x, tile.y, real ? tile.z : 0, real ? n : 0, count == 1, false};
}
#endif

// A ring of stages as a reader sees it.
struct Ring {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() { if (++stage == STAGES) stage = 0, parity ^= 1; }
};

// The producer's units, two at a time, as the other warps see them: they would wait for `tiles`.
struct Queue {
  u32 base, turn = 0;
  __device__ __forceinline__ explicit Queue(u32 smem) : base(smem + OFF_QUEUE) {}
  __device__ __forceinline__ u32 slot() const { return turn & 1; }
  __device__ __forceinline__ void push(const Unit& unit) {
    barrier_wait(base + 48 + slot() * 8, (turn >> 1 & 1) ^ 1);
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};"
                 ::"r"(base + slot() * 16), "r"(unit.expert), "r"(unit.row), "r"(unit.rows), "r"(unit.n) : "memory");
    barrier_arrive(base + 32 + slot() * 8);
    ++turn;
  }
  __device__ __forceinline__ Unit pop(int lane) {
    barrier_wait(base + 32 + slot() * 8, turn >> 1 & 1);
    Unit unit;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.expert), "=r"(unit.row), "=r"(unit.rows), "=r"(unit.n) : "r"(base + slot() * 16) : "memory");
    __syncwarp();
    if (lane == 0) barrier_arrive(base + 48 + slot() * 8);
    ++turn;
    unit.expert = __shfl_sync(~0u, unit.expert, 0), unit.row = __shfl_sync(~0u, unit.row, 0);
    unit.rows = __shfl_sync(~0u, unit.rows, 0), unit.n = __shfl_sync(~0u, unit.n, 0);
    return unit;
  }
};

// The next unit of a pair, from the producer of its first CTA, who takes it, to that of the second.
struct Choice {
  u32 base, turn = 0;
  __device__ __forceinline__ explicit Choice(u32 smem) : base(smem + OFF_CHOICE) {}
  __device__ __forceinline__ u32 slot() const { return base + (turn & 1) * 8; }
  __device__ __forceinline__ void send(int unit) {
    barrier_wait(slot() + 32, (turn >> 1 & 1) ^ 1);
    const u32 there = address_in(slot(), 1);
    barrier_expect_in(there + 16, 4);
    store_in(there, unit, there + 16);
    ++turn;
  }
  __device__ __forceinline__ int receive() {
    barrier_wait(slot() + 16, turn >> 1 & 1);
    int unit;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(unit) : "r"(slot()) : "memory");
    barrier_arrive_in(address_in(slot() + 32, 0));
    ++turn;
    return unit;
  }
};

// A stage is free when the warps of every CTA it may be filled by have read it.
__device__ __forceinline__ void release(u32 bar, int lane) {
#if PAIR == 1
  if (lane == 0) barrier_arrive(bar);
#else
  if (lane < 2) barrier_arrive_in(address_in(bar, lane));
#endif
}
