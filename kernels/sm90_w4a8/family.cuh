// The kernel of a source with the stages of stages.cuh and a `run_unit`; KERNEL is its name.

struct W4a8 {
  const u8* w;
  const XMaps& x_maps;
  const float* x_scale;
  const int* pair_of_row;
  Output out;

  __device__ __forceinline__ void load_weights(const Unit& unit, int k, u32 base, u32 s, int rank, u32 bar) const {
    load_panels(w, unit, k, base + OFF_W + s * W_BYTES, rank, bar);
  }
  __device__ __forceinline__ void load_x(const Unit& unit, const TensorMap* map, int k, u32 base, u32 s, u32 bar) const {
    load_2d(base + OFF_X + s * X_BYTES, map, k * 128, unit.row, bar);
  }
  template <int N>
  __device__ __forceinline__ void run_unit(const Unit& unit, Worker& at) const {
    ::run_unit<N>(unit, at, x_scale, pair_of_row, out);
  }
  __device__ __forceinline__ void end(int) const {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(
    const int4* tiles, const int* tile_count, int* units_taken, const u8* x, const float* x_scale, const int* pair_of_row,
    u16* __restrict__ out, const float* __restrict__ bias, const ActParameters act, const __grid_constant__ Routing routing,
    const __grid_constant__ XMaps x_maps, const u8* __restrict__ w) {
  extern __shared__ __align__(1024) u8 smem[];
  W4a8 family{w, x_maps, x_scale, pair_of_row, {out, bias, act}};
  grouped_gemm(family, {tiles, tile_count, units_taken, x, pair_of_row}, routing, smem);
}
