// Scales of the tokens of a unit of at most N rows, one each: lane l has those of tokens l, l + 32 .. A family defines
// CODE_UNIT, which the sums are to be multiplied by beside.
template <int N>
struct TokenScales {
  static constexpr int COUNT = (N + 31) / 32;
  float of[COUNT];
  __device__ __forceinline__ void load(const float* x_scale, const int* pair_of_row, const Unit& unit, int lane) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = unit.row + min(i * 32 + lane, max(unit.rows - 1, 0));
#if GATHER
      of[i] = __ldcg(x_scale + __ldcg(pair_of_row + row) / GATHER);
#else
      of[i] = __ldcg(x_scale + row);
#endif
    }
  }
  // Those of the two tokens that a lane has of eight.
  __device__ __forceinline__ float2 get(int eight, int quad) const {
    const float x = of[eight / 4];
    const int lane = (eight & 3) * 8 + quad * 2;
    return {__shfl_sync(~0u, x, lane) * CODE_UNIT, __shfl_sync(~0u, x, lane + 1) * CODE_UNIT};
  }
  __device__ __forceinline__ static float of_one(float2 by, int, int second) { return second ? by.y : by.x; }
};
