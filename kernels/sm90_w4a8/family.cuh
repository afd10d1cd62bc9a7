struct W4a8 {
  const u8* w;
  const XMaps& x_maps;
  const float* x_scale;
  const int* pair_of_row;
  Output out;

  __device__ __forceinline__ const TensorMap* x_map(const Unit& unit) const { return &x_maps.of[class_of(unit.rows)]; }
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
