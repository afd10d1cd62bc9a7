#include "sm90/routing.cuh"

struct XMaps { TensorMap of[CLASSES]; };  // boxes of the rows of each class

// The tiles to work on, and the tokens of their rows.
struct Work {
  const int4* tiles;
  const int* tile_count;
  int* units_taken;
  const u8* x;
  const int* pair_of_row;
};

// The kernel of a family of grouped GEMMs. A persistent CTA works through units, the next free one each time, as units
// differ in cost: a tile of rows times 256 weight rows. One thread fills the ring of stages, the other warps beside it
// gather tokens or bring scales, and two warpgroups multiply. A CTA ends when all that others of its cluster write to it
// has arrived: what arrives at a CTA that has ended is a fault. A family has its `x_maps`, and
//   load_weights(unit, k, base, stage, rank, bar)  starts the loads of a stage's weights; `bar` expects these and x
//   load_x(unit, x_map, k, base, stage, bar)       of its tokens, where they are not gathered
//   bring_scales(unit, k_begin, k_end, ..)         one warp's, if SCALE_WARPS is 1
//   run_unit<N>(unit, worker)                      the sums of a unit of at most N rows, and its part of the output
//   end(lane)                                      what a warp that multiplies does behind its last unit
template <class Family>
__device__ __forceinline__ void grouped_gemm(Family& family, Work work, const Routing& routing, u8* smem) {
  constexpr int GATHER_WARPS = GATHER > 0 ? 2 : 0;
  const u32 base = smem_address(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
  const int rank = blockIdx.x % CLUSTER;
  const int first_unit = blockIdx.x / CLUSTER, unit_stride = gridDim.x / CLUSTER;
  const int k_begin = SPLIT > 1 ? KBLOCKS * rank / SPLIT : 0, k_end = SPLIT > 1 ? KBLOCKS * (rank + 1) / SPLIT : KBLOCKS;
  auto full = [&](u32 s) { return base + OFF_FULL + s * 8; };
  auto empty = [&](u32 s) { return base + OFF_EMPTY + s * 8; };

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full(s), 1 + 32 * (SCALE_WARPS + GATHER_WARPS));
      barrier_init(empty(s), RELEASES);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(base + OFF_QUEUE + 32 + i * 8, 1);
      barrier_init(base + OFF_QUEUE + 48 + i * 8, MATH_THREADS + 32 * (SCALE_WARPS + GATHER_WARPS));
      barrier_init(base + OFF_CHOICE + 16 + i * 8, 1);
      barrier_init(base + OFF_CHOICE + 32 + i * 8, 1);
    }
    barrier_init(base + OFF_SPLIT, 1);
    barrier_init(base + OFF_SPLIT + 8, MATH_THREADS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
#if ROUTED
  // What is in front of the kernel in front has ended: that lets this one start only then.
  work.tiles = (const int4*)(smem + OFF_TILES);
  work.tile_count = (const int*)(smem + OFF_TILES + ROUTED_PAIRS * 16);
  if (warp == 11) make_tiles(routing, (int4*)work.tiles, (int*)work.tile_count, lane);
  __syncthreads();
#endif
  if (CLUSTER > 1) cluster_sync(); else __syncthreads();

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
    if (warp == 8 && lane == 0) {
      int ahead = 0;
      if (!EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
      const int units = *work.tile_count * UNITS_A_TILE;
      if (EARLY) {
        if (first_unit < units) {
          const Unit unit = unit_of(work.tiles, first_unit, rank);
          for (; ahead < AHEAD && ahead < k_end - k_begin; ++ahead) family.load_weights(unit, k_begin + ahead, base, ahead, rank, full(ahead));
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
      }
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      u32 s = 0, parity = 1;
      Queue queue(base);
      Choice choice(base);
      for (int u = first_unit; u < units;) {
        const Unit unit = unit_of(work.tiles, u, rank);
        int next = u + unit_stride;
        // SPLIT CTAs would have to agree; their units are few and alike.
        if (SPLIT == 1 && rank == 0) next = unit_stride + atomicAdd(work.units_taken, 1);
        queue.push(unit);
        const TensorMap* x_map = &family.x_maps.of[class_of(unit.rows)];
        for (int k = k_begin; k < k_end; ++k) {
          if (ahead > 0) {
            --ahead;
          } else {
            barrier_wait(empty(s), parity);
            family.load_weights(unit, k, base, s, rank, full(s));
          }
          if (!GATHER) family.load_x(unit, x_map, k, base, s, full(s));
          if (++s == STAGES) s = 0, parity ^= 1;
          if (PAIR > 1 && rank == 0 && k == k_begin) choice.send(next);
        }
        u = PAIR > 1 && rank > 0 ? choice.receive() : next;
      }
      queue.push({0, 0, -1, 0});
      if (PAIR > 1) {
        for (int i = 0; i < STAGES; ++i) {
          barrier_wait(empty(s), parity);
          if (++s == STAGES) s = 0, parity ^= 1;
        }
        if (rank == 0) choice.await_taken();
      }
    } else if (warp == 9) {
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
      if constexpr (SCALE_WARPS > 0) {
        u32 s = 0, parity = 1;
        Queue queue(base);
        for (Unit unit = queue.pop(); unit.rows >= 0; unit = queue.pop()) family.bring_scales(unit, k_begin, k_end, smem, base, lane, s, parity);
      }
    } else {
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#if GATHER
      // A warp copies every second four rows of a tile, a lane 16 bytes of each.
      if (warp >= 10) {
        u32 s = 0, parity = 1;
        Queue queue(base);
        const int odd = warp - 10, chunk = lane & 7, row_of_four = lane / 8;
        const u32 to = base + OFF_X + odd * 512 + row_of_four * 128 + (chunk ^ (odd * 4 + row_of_four)) * 16;
        for (Unit unit = queue.pop(); unit.rows >= 0; unit = queue.pop()) {
          const int rows = rows_of(class_of(unit.rows));
          u32 token_at[ROWS / 8];
#pragma unroll
          for (int i = 0; i < ROWS / 8; ++i) {
            const int row = i * 8 + odd * 4 + row_of_four;
            token_at[i] = 0;
            if (i * 8 < rows) token_at[i] = (u32)(__ldcg(work.pair_of_row + unit.row + min(row, max(unit.rows - 1, 0))) / GATHER) * (u32)(K * X_PARTS);
          }
          for (int k = k_begin; k < k_end; ++k) {
            barrier_wait(empty(s), parity);
#pragma unroll
            for (int part = 0; part < X_PARTS; ++part) {
              const int column = (k * X_PARTS + part) * 128 + chunk * 16;  // in bytes
              const bool within = column < K * X_PARTS;
              const u8* from = work.x + (within ? column : 0);
#pragma unroll
              for (int i = 0; i < ROWS / 8; ++i)
                if (i * 8 < rows) copy_16(to + s * X_BYTES + part * ROWS * 128 + i * 1024, from + token_at[i], within ? 16 : 0);
            }
            copies_arrive(full(s));
            if (++s == STAGES) s = 0, parity ^= 1;
          }
        }
      }
#endif
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGISTERS));
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
    Worker worker{smem, base, rank, k_begin, k_end};
    Queue queue(base);
    for (Unit unit = queue.pop(); unit.rows >= 0; unit = queue.pop()) {
#define RUN(INDEX, N) case INDEX: family.template run_unit<N>(unit, worker); break;
      switch (class_of(unit.rows)) { EACH_CLASS(RUN) }
    }
    family.end(lane);
    worker.await_sums_taken();
  }
}
