// The routing of at most ROUTED_PAIRS pairs, as the first kernel of a call is given it.
struct Routing {
  const void* ids;
  const void* expert_map;
  int pairs, experts, map_size;  // map_size < 0: ids are indices
  int wide_ids, wide_map;        // int64
};

__device__ __forceinline__ int local_expert(const Routing& routing, int pair) {
  auto at = [](const void* from, int wide, long long i) { return wide ? ((const long long*)from)[i] : (long long)((const int*)from)[i]; };
  long long expert = pair < routing.pairs ? at(routing.ids, routing.wide_ids, pair) : -1;
  if (routing.map_size >= 0) expert = expert >= 0 && expert < routing.map_size ? at(routing.expert_map, routing.wide_map, expert) : -1;
  return expert >= 0 && expert < routing.experts ? (int)expert : routing.experts;
}

static_assert(ROUTED_PAIRS == 32, "a lane of one warp has one pair");

// One warp makes the tiles that the sort in front makes, to have the weights come before that has ended.
__device__ __forceinline__ void make_tiles(const Routing& routing, int4* tiles, int* count, int lane) {
  const int expert = local_expert(routing, lane);
  int row = 0, place = 0, rows = 0;
  for (int other = 0; other < ROUTED_PAIRS; ++other) {
    const int of = __shfl_sync(~0u, expert, other);
    row += of < expert || (of == expert && other < lane);
    place += of == expert && other < lane;
    rows += of == expert;
  }
  const bool begins = expert < routing.experts && place % ROWS == 0;
  const u32 all = __ballot_sync(~0u, begins);
  int index = 0;
  for (int other = 0; other < ROUTED_PAIRS; ++other) {
    const int their_row = __shfl_sync(~0u, row, other);
    index += (all >> other & 1) && their_row < row;
  }
  if (begins)
    tiles[index] = make_int4(expert, row, min(rows - place, ROWS), (index - place / ROWS) | (rows + ROWS - 1) / ROWS << 16);
  if (lane == 0) *count = __popc(all);
}
