"""Grouped GEMM for SM90 in CuTe DSL: FP8 rows by FP8 weights, each row with a float32 scale.

    out[r, n] = x_scale[r] * w_scale[e, n] * (sum over k of x[r, k] * w[e * N + n, k]) + bias[e, n]

w            float8_e4m3fn [E * N, K]  the weights of E experts; K a multiple of 16
x            float8_e4m3fn [R, K]      rows in the order of their experts
w_scale      float32 [E, N]
x_scale      float32 [R]
bias         float32 [E, N]            read by variants with a bias alone
out          bfloat16 [R, N]           rounded once; N a multiple of 8
tiles        int32 [tiles, 4]          expert, first row, rows: see `moequant.kernels.routing`
tile_count   int32 [1]

A unit of work is a tile and WEIGHT_ROWS weight rows of its expert. The weights are the first
operand of WGMMA, whose 64 rows they fill, and the rows of the tile the second, which may be as few
as 8. One warp loads by TMA; two warpgroups multiply, scale in float32 and store. CTAs are
persistent: unit u belongs to CTA u modulo the grid. What TMA reads behind a tile or an expert is
multiplied too and not stored; what lies behind K or a tensor is read as 0.

This module imports the package nvidia-cutlass-dsl, and is imported to compile alone.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, nullptr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from moequant.kernels.cutlass.variant import COLUMNS, THREADS, WEIGHT_ROWS

if TYPE_CHECKING:
    from moequant.kernels.cutlass.variant import GemmVariant

E4M3 = cutlass.Float8E4M3FN
FIELDS = 4  # of a tile; TILE_FIELDS, without importing triton
_GROUP = 128  # threads of a warpgroup
_MULTIPLIERS = THREADS - _GROUP
_LOADER_REGISTERS, _MULTIPLIER_REGISTERS = 40, 232  # 504 of 512, which are an SM's by 128 threads
_CHUNK = 8  # elements of a 16-byte store
_OUT_BARRIER = 1


def compile_variant(variant: GemmVariant) -> tuple[bytes, str]:
    """A cubin for sm_90a, and the PTX it was made from. Needs no GPU, and no CUDA toolkit."""
    rows_of_fp8 = make_fake_compact_tensor(
        E4M3,
        (cute.sym_int(), cute.sym_int(divisibility=16)),
        stride_order=(1, 0),
        assumed_align=16,
    )
    floats, out, ints = (
        nullptr(dtype, cute.AddressSpace.gmem, assumed_align=align)
        for dtype, align in ((cutlass.Float32, 4), (cutlass.BFloat16, 16), (cutlass.Int32, 4))
    )
    with tempfile.TemporaryDirectory() as dump:
        compiled = cute.compile(
            _GroupedGemm(variant),
            rows_of_fp8,
            rows_of_fp8,
            floats,
            floats,
            floats,
            out,
            ints,
            ints,
            cutlass.Int32(0),
            cutlass.Int32(0),
            options=f"--gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {dump}",
        )
        return compiled.__cubin__, compiled.__ptx__


class _GroupedGemm:
    def __init__(self, variant: GemmVariant) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        w: cute.Tensor,
        x: cute.Tensor,
        w_scale: cute.Pointer,
        x_scale: cute.Pointer,
        bias: cute.Pointer,
        out: cute.Pointer,
        tiles: cute.Pointer,
        tile_count: cute.Pointer,
        N: cutlass.Int32,
        K: cutlass.Int32,
    ) -> None:
        """Traced to compile `kernel`, which moequant.kernels.cutlass.grouped_gemm launches."""
        v = self.variant
        unit = (WEIGHT_ROWS, v.tile_rows, COLUMNS)
        w_layout = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, unit, E4M3, v.stages)
        x_layout = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, unit, E4M3, v.stages)
        # The weights' rows lie side by side, as they will in `out`.
        out_layout = hopper_helpers.make_smem_layout_epi(
            cutlass.BFloat16, LayoutEnum.COL_MAJOR, unit[:2], 1
        )
        w_load, w = self._loads(w, w_layout, WEIGHT_ROWS)
        x_load, x = self._loads(x, x_layout, v.tile_rows)
        self.kernel(
            w_load, w, x_load, x, w_scale, x_scale, bias, out, tiles, tile_count, N, K,
            w_layout, x_layout, out_layout,
        ).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), smem=v.shared_bytes, min_blocks_per_mp=1
        )  # fmt: skip

    def _loads(self, tensor: Any, layout: Any, rows: int) -> Any:
        """A TMA load of [rows, COLUMNS], and the coordinates of `tensor`."""
        stage = cute.slice_(layout, (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(load, tensor, stage, (rows, COLUMNS))

    @cute.kernel
    def kernel(
        self,
        w_load: cute.CopyAtom,
        w: cute.Tensor,
        x_load: cute.CopyAtom,
        x: cute.Tensor,
        w_scale: cute.Pointer,
        x_scale: cute.Pointer,
        bias: cute.Pointer,
        out: cute.Pointer,
        tiles: cute.Pointer,
        tile_count: cute.Pointer,
        N: cutlass.Int32,
        K: cutlass.Int32,
        w_layout: cute.ComposedLayout,
        x_layout: cute.ComposedLayout,
        out_layout: cute.ComposedLayout,
    ) -> None:
        """One CTA."""
        v = self.variant
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator()
        w_stages = shared.allocate_tensor(E4M3, w_layout.outer, 1024, w_layout.inner)
        x_stages = shared.allocate_tensor(E4M3, x_layout.outer, 1024, x_layout.inner)
        tile_out = shared.allocate_tensor(
            cutlass.BFloat16, out_layout.outer, 1024, out_layout.inner
        )[None, None, 0]
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared.allocate_array(cutlass.Int64, 2 * v.stages),
            num_stages=v.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # One thread of each warp says that the warp has read a stage.
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, _MULTIPLIERS // 32),
            tx_count=v.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        # Before anything is read that the kernel in front wrote: see moequant.kernels.launch.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        N = cute.assume(N, divby=_CHUNK)
        bands = cute.ceil_div(N, WEIGHT_ROWS)
        steps = cute.ceil_div(K, COLUMNS)
        units = cute.make_tensor(tile_count, cute.make_layout(1))[0] * bands
        if warp_index < _GROUP // 32:
            cute.arch.setmaxregister_decrease(_LOADER_REGISTERS)
            if warp_index == 0:
                self.load(
                    ring, w_load, w, w_stages, x_load, x, x_stages,
                    tiles, block, grid, units, bands, steps, N,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(_MULTIPLIER_REGISTERS)
            self.multiply(
                thread - _GROUP, ring, w_stages, x_stages, tile_out, w_scale, x_scale, bias, out,
                tiles, block, grid, units, bands, steps, N,
            )  # fmt: skip

    @cute.jit
    def load(
        self, ring, w_load, w, w_stages, x_load, x, x_stages,
        tiles, block, grid, units, bands, steps, N,
    ):  # fmt: skip
        """Load the steps of this CTA's units, one behind the other; of one warp."""
        stages = self.variant.stages
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        unit = block
        while unit < units:
            expert, row, _ = self.tile(tiles, unit // bands)
            w_row = expert * N + unit % bands * WEIGHT_ROWS
            w_to, w_from = self.boxes(w_load, w, w_stages, w_row, WEIGHT_ROWS)
            x_to, x_from = self.boxes(x_load, x, x_stages, row, self.variant.tile_rows)
            for step in cutlass.range(steps, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(w_load, w_from[None, step], w_to[None, state.index], tma_bar_ptr=full)
                cute.copy(x_load, x_from[None, step], x_to[None, state.index], tma_bar_ptr=full)
                ring.producer_commit(state)
                state.advance()
            unit += grid
        ring.producer_tail(state)

    @cute.jit
    def boxes(self, load, tensor, stages, row, rows: cutlass.Constexpr):
        """Where TMA writes, [box, stage], and what it reads from `row` on, [box, step]."""
        there = cute.local_tile(cute.domain_offset((row, 0), tensor), (rows, COLUMNS), (0, None))
        to, source = cute.group_modes(stages, 0, 2), cute.group_modes(there, 0, 2)
        return cpasync.tma_partition(load, 0, cute.make_layout(1), to, source)

    @cute.jit
    def tile(self, tiles, index):
        """Expert, first row and rows of a tile."""
        at = cute.make_tensor(tiles + index * FIELDS, cute.make_layout(FIELDS))
        return at[0], at[1], at[2]

    @cute.jit
    def multiply(
        self, thread, ring, w_stages, x_stages, tile_out, w_scale, x_scale, bias, out,
        tiles, block, grid, units, bands, steps, N,
    ):  # fmt: skip
        """Compute and store this CTA's units; of two warpgroups, `thread` in 0 to 255."""
        v = self.variant
        mma = hopper_helpers.make_trivial_tiled_mma(
            E4M3, E4M3, OperandMajorMode.K, OperandMajorMode.K, cutlass.Float32,
            (_MULTIPLIERS // _GROUP, 1, 1), (64, v.tile_rows),
        )  # fmt: skip
        group = mma.get_slice(cute.arch.make_warp_uniform(thread // _GROUP) * _GROUP)
        w_operand = mma.make_fragment_A(group.partition_A(w_stages))
        x_operand = mma.make_fragment_B(group.partition_B(x_stages))
        # (weight row, row) of each of the thread's sums. The first two are of neighbouring rows,
        # the next two of these rows and 8 weight rows below, and so on for every 8 rows.
        place = mma.get_slice(thread).partition_C(
            cute.make_identity_tensor((WEIGHT_ROWS, v.tile_rows))
        )
        sums = cute.make_rmem_tensor(place.shape, cutlass.Float32)
        part = cute.make_rmem_tensor(place.shape, cutlass.Float32)
        rounded = cute.make_rmem_tensor(place.shape, cutlass.BFloat16)
        # Four 8 x 8 matrices a store, transposed; a tile of 8 rows has two.
        matrices = warp.StMatrix8x8x16bOp(True, min(v.tile_rows // 4, 4))
        store = cute.make_tiled_copy_C(cute.make_copy_atom(matrices, cutlass.BFloat16), mma)
        own = store.get_slice(thread)
        out_barrier = pipeline.NamedBarrier(barrier_id=_OUT_BARRIER, num_threads=_MULTIPLIERS)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, v.stages)
        unit = block
        while unit < units:
            expert, row, rows = self.tile(tiles, unit // bands)
            column = unit % bands * WEIGHT_ROWS
            w_row = expert * N + column
            w_scales = self.of_weight_rows(place, w_scale + w_row, N - column)
            x_scales = self.of_rows(place, x_scale + row, rows)
            if cutlass.const_expr(v.bias):
                biases = self.of_weight_rows(place, bias + w_row, N - column)
            sums.fill(0.0)
            for _ in cutlass.range(steps, unroll=1):
                ring.consumer_wait(state)
                warpgroup.fence()
                mma.set(warpgroup.Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(COLUMNS // 32):
                    at = (None, None, k, state.index)
                    cute.gemm(mma, part, w_operand[at], x_operand[at], part)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                ring.consumer_release(state)
                state.advance()
                # The tensor cores keep about 14 bits of a sum.
                sums.store(sums.load() + part.load())
            for four in cutlass.range_constexpr(v.tile_rows // 8):
                for i in cutlass.range_constexpr(4):
                    at = 4 * four + i
                    scale = w_scales[i // 2] * x_scales[2 * four + i % 2]
                    result = sums[at] * scale
                    if cutlass.const_expr(v.bias):
                        result += biases[i // 2]
                    rounded[at] = result.to(cutlass.BFloat16)
            out_barrier.arrive_and_wait()  # The tile before is stored.
            cute.copy(store, own.retile(rounded), own.partition_D(tile_out))
            out_barrier.arrive_and_wait()
            first = out.toint() + 2 * (cutlass.Int64(row) * N + column)
            self.store_rows(thread, tile_out, first, rows, N, N - column)
            unit += grid

    @cute.jit
    def of_weight_rows(self, place, values, rows):
        """The numbers of this thread's two weight rows, float32.

        Behind the last of `rows`, it is that one's: nothing is read behind it, or stored of it.
        """
        there = cute.make_tensor(values, cute.make_layout(WEIGHT_ROWS))
        own = cute.make_rmem_tensor(2, cutlass.Float32)
        for i in cutlass.range_constexpr(2):
            at, _ = place[2 * i]
            own[i] = there[cutlass.min(at, rows - 1)]
        return own

    @cute.jit
    def of_rows(self, place, values, rows):
        """The same of its rows of the tile, in pairs of neighbours."""
        tile_rows = self.variant.tile_rows
        there = cute.make_tensor(values, cute.make_layout(tile_rows))
        own = cute.make_rmem_tensor(tile_rows // 4, cutlass.Float32)
        for i in cutlass.range_constexpr(tile_rows // 4):
            _, at = place[i // 2 * 4 + i % 2]
            own[i] = there[cutlass.min(at, rows - 1)]
        return own

    @cute.jit
    def store_rows(self, thread, tile_out, address, rows, N, columns):
        """Store `rows` rows of at most WEIGHT_ROWS of `columns` columns, 16 threads a row."""
        target = cute.make_tensor(
            cute.make_ptr(cutlass.BFloat16, address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((WEIGHT_ROWS, self.variant.tile_rows), stride=(1, N)),
        )
        chunks = WEIGHT_ROWS // _CHUNK
        chunk = thread % chunks
        for first in cutlass.range_constexpr(0, self.variant.tile_rows, _MULTIPLIERS // chunks):
            at = (chunk, first + thread // chunks)
            if at[1] < rows and chunk * _CHUNK < columns:
                cute.autovec_copy(
                    cute.local_tile(tile_out, (_CHUNK, 1), at),
                    cute.local_tile(target, (_CHUNK, 1), at),
                )


# What profilers show, with a number behind it.
_GroupedGemm.kernel.set_name_prefix(
    "cutlass_sm90_fp8_channel_grouped_gemm", remove_cutlass_symbol=True, keep_mangled_name=False
)
