// How the CTAs of a grouped GEMM share its units of work, and their warps a ring of stages. A family's source
// defines before: OFF_FULL, behind its stages, SCRATCH_BYTES of its own behind the barriers, and X_PARTS, the bytes of
// an element of x: a stage has 128 columns, so as many pieces of 128 bytes of a row, one piece of all rows behind the
// other.
//
// Compile-time: ROWS (most rows of a tile), STAGES, SHARED_BYTES (of a CTA), SPLIT, PAIR, GATHER, ROUTED, EARLY, K,
// KBLOCKS (ceil(K / 128)), UNITS_N (units along n). SPLIT CTAs of a cluster share a unit along K; the first adds up
// their sums, in their order. PAIR = 2: the CTAs of a cluster have two tiles of one expert and the same weight rows;
// each loads half of these for both. GATHER = top-k: `x` and `x_scale` are of tokens, not of rows; two warps copy the
// tokens of a tile's rows. EARLY: weights do not wait for the kernel in front. ROUTED: the tiles are made here, from
// the ids of at most ROUTED_PAIRS pairs.

constexpr int THREADS = 384;
constexpr int MATH_THREADS = 256;
constexpr int CLUSTER = SPLIT * PAIR;
// Stages of weights that are asked for before the kernel in front has ended. The first tokens come behind them: where
// these are there soon, as behind `prepare`, more than a few stages would only delay them.
constexpr int AHEAD = ROUTED && STAGES > 4 ? 4 : STAGES;
constexpr u32 OFF_EMPTY = OFF_FULL + STAGES * 8;
constexpr u32 OFF_SPLIT = OFF_EMPTY + STAGES * 8;  // two barriers
constexpr u32 OFF_QUEUE = (OFF_SPLIT + 16 + 127) / 128 * 128;  // two units, their full and empty barriers
constexpr u32 OFF_CHOICE = OFF_QUEUE + 64;  // two numbers of units, the same
constexpr u32 OFF_SCRATCH = OFF_QUEUE + 128;
constexpr u32 OFF_PARTIAL = OFF_SCRATCH + SCRATCH_BYTES;
constexpr u32 OFF_TILES = OFF_PARTIAL + (SPLIT - 1) * ROWS * MATH_THREADS * 4;  // and their number
constexpr int SWAP_ROWS = ROWS < 64 ? ROWS : 64;  // most rows of a last tile that is not paired
static_assert(SPLIT == 1 || ROWS <= 32, "split sums do not fit");
static_assert(OFF_TILES + (ROUTED ? (ROUTED_PAIRS + 1) * 16 : 0) <= SHARED_BYTES, "shared memory of another size");

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
  __device__ __forceinline__ Unit pop() {
    barrier_wait(base + 32 + slot() * 8, turn >> 1 & 1);
    Unit unit;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.expert), "=r"(unit.row), "=r"(unit.rows), "=r"(unit.n) : "r"(base + slot() * 16) : "memory");
    barrier_arrive(base + 48 + slot() * 8);
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
  // Wait until all that was sent is taken.
  __device__ __forceinline__ void await_taken() {
    for (int i = 0; i < 2; ++i, ++turn) barrier_wait(slot() + 32, (turn >> 1 & 1) ^ 1);
  }
  __device__ __forceinline__ int receive() {
    barrier_wait(slot() + 16, turn >> 1 & 1);
    int unit;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(unit) : "r"(slot()) : "memory");
    await_loads();
    barrier_arrive_in(address_in(slot() + 32, 0));
    ++turn;
    return unit;
  }
};

// A stage is free when all threads that multiply have read it, and those of the other CTA of a pair, whose loads fill it
// too. A warp arrives in its own CTA first: once all have arrived in the other one, that CTA may go on, and arrive here
// for its next stage. With the other order it sometimes did so before this warp had arrived here, and the kernel ended in
// a launch failure; probably a warp's 32 arrivals, which the hardware counts at once, went beyond the end of a phase.
constexpr int RELEASES = PAIR * MATH_THREADS;
__device__ __forceinline__ void release(u32 bar) {
  barrier_arrive(bar);
#if PAIR > 1
  barrier_arrive_in(address_in(bar, (blockIdx.x & 1) ^ 1));
#endif
}

// A warpgroup's place in the ring and in the cluster.
struct Worker {
  u8* smem;
  u32 base;  // its address
  int rank, k_begin, k_end;
  Ring ring;
  u32 split_parity = 0;
  // Wait until the first CTA has read what this one gave of its last split sums.
  __device__ __forceinline__ void await_sums_taken() const {
    if (SPLIT > 1 && rank > 0) barrier_wait(base + OFF_SPLIT + 8, split_parity ^ 1);
  }
};

// What threads copied is to be read by the tensor cores.
__device__ __forceinline__ void see_copies() {
  if (GATHER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Add up the sums of a unit of at most N rows that the CTAs of a cluster have; false in those that gave theirs.
template <int N>
__device__ __forceinline__ bool add_splits(float (&sum)[2][N / 2], Worker& at) {
#if SPLIT > 1
  // 16 bytes a thread side by side, for either half of a cluster's sums.
  constexpr u32 PITCH = MATH_THREADS * 16, BYTES = N * MATH_THREADS * 4;
  constexpr int ACC = N / 2;
  const u32 sums_in = at.base + OFF_SPLIT, sums_out = at.base + OFF_SPLIT + 8;
  if (at.rank > 0) {
    barrier_wait(sums_out, at.split_parity ^ 1);
    const u32 to = address_in(at.base + OFF_PARTIAL + (at.rank - 1) * BYTES + threadIdx.x * 16, 0);
#pragma unroll
    for (int i = 0; i < N; i += 4) store_in(to + i / 4 * PITCH, &sum[i / ACC][i % ACC], address_in(sums_in, 0));
    at.split_parity ^= 1;
    return false;
  }
  if (threadIdx.x == 0) barrier_expect(sums_in, (SPLIT - 1) * BYTES);
  barrier_wait(sums_in, at.split_parity);
#pragma unroll
  for (int other = 0; other < SPLIT - 1; ++other) {
    const u8* from = at.smem + OFF_PARTIAL + other * BYTES + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 x = *(const float4*)(from + i / 4 * PITCH);
      sum[i / ACC][i % ACC] += x.x;
      sum[i / ACC][i % ACC + 1] += x.y;
      sum[i / ACC][i % ACC + 2] += x.z;
      sum[i / ACC][i % ACC + 3] += x.w;
    }
  }
  await_loads();
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    for (int other = 1; other < SPLIT; ++other) barrier_arrive_in(address_in(sums_out, other));
  at.split_parity ^= 1;
#endif
  return true;
}
