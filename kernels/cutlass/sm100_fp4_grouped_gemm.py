"""Grouped GEMM for SM100 in CuTe DSL: four-bit rows by four-bit weights, block scales on both.

    out[r, n] = x_factor[r] * alpha[e, n // (N / A)] *
                sum over k of x[r, k] * x_scale[r, k] * w[e, n, k] * w_scale[e, n, k]

x and w are E2M1 codes, two a byte, the even column low. A scale is a byte for a group of `group`
columns. Scales are in tiles of 128 rows by 4 groups, 512 bytes each, see
`moequant.layouts.swizzle_128x4`; with G = ceil(K / group / 4) and B = ceil(N / 128):

x            uint8 [R, K / 2]        rows in the order of their experts; K a multiple of 32
w            uint8 [E * N, K / 2]
x_scale      int64 [tiles, 64 * G]   i: the rows of tile i, and anything for the rows it lacks
w_scale      int64 [E * B, 64 * G]   e * B + b: rows 128 * b on of expert e
x_factor     float32 [R]             the rows' global scales; with E4M3 scales only
alpha        float32 [E, A]          those of A equal parts of the weights, such as gate and up;
                                     N / A a multiple of 32 unless A = 1
out          bfloat16 [R, N]         rounded once; N a multiple of 8
tiles        int32 [tiles, 4]        expert, first row, rows: see `moequant.kernels.routing`
tile_count   int32 [1]

Each expert's tiles have 128 rows but for its last. So tile i's scales are those that rows padded to
a multiple of 128 for each expert have, as vLLM's `blockscale_offsets` say.

A unit of work is a tile and 128 weight rows of its expert. One warp loads by TMA. One copies scales
into tensor memory and issues the block-scaled MMA of tcgen05, which adds into one of two
accumulators in tensor memory. Four warps read the other, multiply by the factors, and store the
rows that the tile has. CTAs are persistent: unit u belongs to CTA u modulo the grid. What TMA reads
behind a tile or an expert is multiplied too and not stored; what lies behind K or a tensor is read
as 0.

Compiled, never run: there was no SM100 GPU. Sources: PTX ISA, "tcgen05.mma", for what the MMA
reads; CUTLASS 4.8's CuTe DSL examples for Blackwell for how its parts are called.

This module imports the package nvidia-cutlass-dsl, and is imported to compile alone.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, nullptr
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import blackwell_helpers, blockscaled_layout

from moequant.kernels.cutlass.sm100_fp4_variant import (
    MMA_K,
    STEP,
    THREADS,
    TILE_ROWS,
    WEIGHT_ROWS,
)

if TYPE_CHECKING:
    from moequant.kernels.cutlass.sm100_fp4_variant import Fp4Variant

E2M1 = cutlass.Float4E2M1FN
FIELDS = 4  # of a tile; TILE_FIELDS, without importing triton
_UNIT = (TILE_ROWS, WEIGHT_ROWS, STEP)
_STORING_WARPS = 4
_MULTIPLYING_WARP, _LOADING_WARP = 4, 5
_ACCUMULATORS = 2
_SCALE_COLUMNS = STEP // MMA_K * 4  # of tensor memory, at most: four for 128 scales of 4 bytes
_TENSOR_COLUMNS = 512  # a power of two that holds all these
_READ_COLUMNS = 32  # of an accumulator at a time
_CHUNK = 8  # elements of a 16-byte store
_TENSOR_MEMORY_BARRIER, _FREE_BARRIER = 1, 2


class Compiled(NamedTuple):
    """The kernel for sm_100a."""

    cubin: bytes
    ptx: str


def compile_variant(variant: Fp4Variant) -> Compiled:
    """Compile; needs no GPU, and no CUDA toolkit."""

    def rows_of(dtype: Any, divisibility: int) -> Any:
        shape = (cute.sym_int(), cute.sym_int(divisibility=divisibility))
        return make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)

    codes, scales = rows_of(cutlass.Uint8, 16), rows_of(cutlass.Int64, 64)
    floats, out, ints = (
        nullptr(dtype, cute.AddressSpace.gmem, assumed_align=align)
        for dtype, align in ((cutlass.Float32, 4), (cutlass.BFloat16, 16), (cutlass.Int32, 4))
    )
    with tempfile.TemporaryDirectory() as dump:
        compiled = cute.compile(
            _GroupedGemm(variant),
            codes,
            codes,
            scales,
            scales,
            floats,
            floats,
            out,
            ints,
            ints,
            cutlass.Int32(0),
            cutlass.Int32(0),
            cutlass.Int32(0),
            options=f"--gpu-arch sm_100a --keep-cubin --keep-ptx --dump-dir {dump}",
        )
        return Compiled(compiled.__cubin__, compiled.__ptx__)


class _GroupedGemm:
    def __init__(self, variant: Fp4Variant) -> None:
        self.variant = variant
        self.scale_dtype = cutlass.Float8E4M3FN if variant.e4m3_scales else cutlass.Float8E8M0FNU

    def mma(self) -> Any:
        """The block-scaled MMA of a unit."""
        return blackwell_helpers.make_blockscaled_trivial_tiled_mma(
            E2M1,
            E2M1,
            OperandMajorMode.K,
            OperandMajorMode.K,
            self.scale_dtype,
            self.variant.group,
            tcgen05.CtaGroup.ONE,
            _UNIT[:2],
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        x_scale: cute.Tensor,
        w_scale: cute.Tensor,
        x_factor: cute.Pointer,
        alpha: cute.Pointer,
        out: cute.Pointer,
        tiles: cute.Pointer,
        tile_count: cute.Pointer,
        N: cutlass.Int32,
        K: cutlass.Int32,
        A: cutlass.Int32,
    ) -> None:
        """Traced to compile `kernel`."""
        v = self.variant
        codes = blackwell_helpers.make_smem_layout(
            OperandMajorMode.K, (TILE_ROWS, STEP // 2), cutlass.Uint8, v.stages
        )
        words = v.scale_bytes // 8
        scales = cute.make_layout((1, words, v.stages), stride=(words, 1, words))
        x_load, x = self._loads(x, codes, (TILE_ROWS, STEP // 2))
        w_load, w = self._loads(w, codes, (WEIGHT_ROWS, STEP // 2))
        x_scale_load, x_scale = self._loads(x_scale, scales, (1, words))
        w_scale_load, w_scale = self._loads(w_scale, scales, (1, words))
        self.kernel(
            x_load, x, w_load, w, x_scale_load, x_scale, w_scale_load, w_scale,
            x_factor, alpha, out, tiles, tile_count, N, K, A, codes, scales,
        ).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), smem=v.shared_bytes, min_blocks_per_mp=1
        )  # fmt: skip

    def _loads(self, tensor: Any, layout: Any, box: tuple[int, int]) -> Any:
        """A TMA load of `box`, and the coordinates of `tensor`."""
        stage = cute.slice_(layout, (None, None, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, stage, box)

    @cute.kernel
    def kernel(
        self,
        x_load: cute.CopyAtom,
        x: cute.Tensor,
        w_load: cute.CopyAtom,
        w: cute.Tensor,
        x_scale_load: cute.CopyAtom,
        x_scale: cute.Tensor,
        w_scale_load: cute.CopyAtom,
        w_scale: cute.Tensor,
        x_factor: cute.Pointer,
        alpha: cute.Pointer,
        out: cute.Pointer,
        tiles: cute.Pointer,
        tile_count: cute.Pointer,
        N: cutlass.Int32,
        K: cutlass.Int32,
        A: cutlass.Int32,
        codes: cute.ComposedLayout,
        scales: cute.Layout,
    ) -> None:
        """One CTA."""
        v = self.variant
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator()
        x_stages, w_stages = (
            shared.allocate_tensor(cutlass.Uint8, codes.outer, 1024, codes.inner) for _ in range(2)
        )
        x_scale_stages, w_scale_stages = (
            shared.allocate_tensor(cutlass.Int64, scales, 1024) for _ in range(2)
        )
        one_cta = cute.make_layout((1, 1, 1, 1))
        one_thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        ring = pipeline.PipelineTmaUmma.create(
            barrier_storage=shared.allocate_array(cutlass.Int64, 2 * v.stages),
            num_stages=v.stages,
            producer_group=one_thread,
            consumer_group=one_thread,
            tx_count=v.stage_bytes,
            cta_layout_vmnk=one_cta,
        )
        sums = pipeline.PipelineUmmaAsync.create(
            barrier_storage=shared.allocate_array(cutlass.Int64, 2 * _ACCUMULATORS),
            num_stages=_ACCUMULATORS,
            producer_group=one_thread,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * _STORING_WARPS),
            cta_layout_vmnk=one_cta,
        )
        tensor_memory = TmemAllocator(
            shared.allocate_array(cutlass.Int32, 1),
            barrier_for_retrieve=pipeline.NamedBarrier(
                barrier_id=_TENSOR_MEMORY_BARRIER, num_threads=32 * (_STORING_WARPS + 1)
            ),
        )
        # Before anything is read that the kernel in front wrote: see moequant.kernels.launch.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        N = cute.assume(N, divby=_CHUNK)
        bands = cute.ceil_div(N, WEIGHT_ROWS)
        steps = cute.ceil_div(K, STEP)
        units = self.number(tile_count) * bands
        if warp == _LOADING_WARP:
            self.load(
                ring,
                (x_load, x, x_stages),
                (w_load, w, w_stages),
                (x_scale_load, x_scale, x_scale_stages),
                (w_scale_load, w_scale, w_scale_stages),
                tiles, block, grid, units, bands, steps, N,
            )  # fmt: skip
        if warp == _MULTIPLYING_WARP:
            tensor_memory.wait_for_alloc()
            self.multiply(
                ring, sums, tensor_memory.retrieve_ptr(cutlass.Float32),
                x_stages, w_stages, x_scale_stages, w_scale_stages, block, grid, units, steps,
            )  # fmt: skip
        if warp < _STORING_WARPS:
            tensor_memory.allocate(_TENSOR_COLUMNS)
            tensor_memory.wait_for_alloc()
            start = tensor_memory.retrieve_ptr(cutlass.Float32)
            self.store(
                thread, sums, start, x_factor, alpha, out, tiles, block, grid, units, bands, N, A
            )
            tensor_memory.relinquish_alloc_permit()
            # All have read what they need of it.
            pipeline.NamedBarrier(
                barrier_id=_FREE_BARRIER, num_threads=32 * _STORING_WARPS
            ).arrive_and_wait()
            tensor_memory.free(start)

    @cute.jit
    def load(self, ring, x, w, x_scale, w_scale, tiles, block, grid, units, bands, steps, N):
        """Load the steps of this CTA's units, one behind the other; of one warp."""
        v = self.variant
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, v.stages)
        words = v.scale_bytes // 8
        unit = block
        while unit < units:
            tile, band = unit // bands, unit % bands
            expert, row, _ = self.tile(tiles, tile)
            x_to, x_from = self.boxes(x, row, (TILE_ROWS, STEP // 2))
            w_row = expert * N + band * WEIGHT_ROWS
            w_to, w_from = self.boxes(w, w_row, (WEIGHT_ROWS, STEP // 2))
            x_scale_to, x_scale_from = self.boxes(x_scale, tile, (1, words))
            w_scale_to, w_scale_from = self.boxes(w_scale, expert * bands + band, (1, words))
            for step in cutlass.range(steps, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                to = (None, state.index)
                cute.copy(x[0], x_from[None, step], x_to[to], tma_bar_ptr=full)
                cute.copy(w[0], w_from[None, step], w_to[to], tma_bar_ptr=full)
                cute.copy(x_scale[0], x_scale_from[None, step], x_scale_to[to], tma_bar_ptr=full)
                cute.copy(w_scale[0], w_scale_from[None, step], w_scale_to[to], tma_bar_ptr=full)
                ring.producer_commit(state)
                state.advance()
            unit += grid
        ring.producer_tail(state)

    @cute.jit
    def boxes(self, operand, row, box: cutlass.Constexpr):
        """Where TMA writes, [box, stage], and what it reads from `row` on, [box, step]."""
        load, tensor, stages = operand
        there = cute.local_tile(cute.domain_offset((row, 0), tensor), box, (0, None))
        to, source = cute.group_modes(stages, 0, 2), cute.group_modes(there, 0, 2)
        return cpasync.tma_partition(load, 0, cute.make_layout(1), to, source)

    @cute.jit
    def tile(self, tiles, index):
        """Expert, first row and rows of a tile."""
        at = cute.make_tensor(tiles + index * FIELDS, cute.make_layout(FIELDS))
        return at[0], at[1], at[2]

    @cute.jit
    def multiply(
        self, ring, sums, start, x_stages, w_stages, x_scale_stages, w_scale_stages,
        block, grid, units, steps,
    ):  # fmt: skip
        """Multiply this CTA's units into tensor memory from `start` on; of one warp."""
        v = self.variant
        mma = self.mma()
        x_layout = blackwell_helpers.make_smem_layout_a(mma, _UNIT, E2M1, v.stages)
        w_layout = blackwell_helpers.make_smem_layout_b(mma, _UNIT, E2M1, v.stages)
        x_operand = mma.make_fragment_A(self.as_codes(x_stages, x_layout))
        w_operand = mma.make_fragment_B(self.as_codes(w_stages, w_layout))
        accumulators = self.accumulators(mma, start)
        at = start + _ACCUMULATORS * WEIGHT_ROWS
        layout = blockscaled_layout.make_smem_layout_sfa(mma, _UNIT, v.group, v.stages)
        own = blockscaled_layout.make_tmem_layout_sfa(
            mma, _UNIT, v.group, cute.slice_(layout, (None, None, None, 0))
        )
        x_scales, copy_x, x_from, x_to = self.scales(x_scale_stages, layout, at, own)
        at = at + _SCALE_COLUMNS
        layout = blockscaled_layout.make_smem_layout_sfb(mma, _UNIT, v.group, v.stages)
        own = blockscaled_layout.make_tmem_layout_sfb(
            mma, _UNIT, v.group, cute.slice_(layout, (None, None, None, 0))
        )
        w_scales, copy_w, w_from, w_to = self.scales(w_scale_stages, layout, at, own)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, v.stages)
        turn = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, _ACCUMULATORS)
        unit = block
        while unit < units:
            sums.producer_acquire(turn)
            total = accumulators[None, None, None, turn.index]
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(steps, unroll=1):
                ring.consumer_wait(state)
                stage = (None, None, None, None, state.index)
                # Copies and MMAs of one thread run in the order in which it issues them.
                cute.copy(copy_x, x_from[stage], x_to)
                cute.copy(copy_w, w_from[stage], w_to)
                for k in cutlass.range_constexpr(STEP // MMA_K):
                    codes, scales = (None, None, k, state.index), (None, None, k)
                    cute.gemm(
                        mma,
                        total,
                        [x_operand[codes], x_scales[scales]],
                        [w_operand[codes], w_scales[scales]],
                        total,
                    )
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                ring.consumer_release(state)
                state.advance()
            sums.producer_commit(turn)
            turn.advance()
            unit += grid
        sums.producer_tail(turn)

    def as_codes(self, stages: Any, layout: Any) -> Any:
        """Stages of bytes, as the E2M1 codes that the MMA reads."""
        start = cute.recast_ptr(stages.iterator, layout.inner, dtype=E2M1)
        return cute.make_tensor(start, layout.outer)

    def accumulators(self, mma: Any, start: Any) -> Any:
        """[MMA, 1, 1, accumulator] in tensor memory from `start` on."""
        shape = cute.append(mma.partition_shape_C(_UNIT[:2]), _ACCUMULATORS)
        return cute.make_tensor(start, mma.make_fragment_C(shape).layout)

    def scales(self, stages: Any, layout: Any, start: Any, own: Any) -> Any:
        """Scales in tensor memory at `start`, laid out as `own`, and the copy that fills them.

        Returns:
            The scales [MMA, 1, k]; the copy; its sources by stage; its destination.
        """
        shared = cute.make_tensor(cute.recast_ptr(stages.iterator, dtype=self.scale_dtype), layout)
        scales = cute.make_tensor(cute.recast_ptr(start, dtype=self.scale_dtype), own)
        once = cute.filter_zeros(scales)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), self.scale_dtype)
        copy = tcgen05.make_s2t_copy(atom, once)
        part = copy.get_slice(0)
        source = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(cute.filter_zeros(shared)))
        return scales, copy, source, part.partition_D(once)

    @cute.jit
    def store(
        self, thread, sums, start, x_factor, alpha, out, tiles, block, grid, units, bands, N, A
    ):
        """Scale, round and store this CTA's units; of four warps, `thread` in 0 to 127."""
        parts = (TILE_ROWS, _READ_COLUMNS)
        accumulators = self.accumulators(self.mma(), start)[(None, None), 0, 0, None]
        accumulators = cute.flat_divide(accumulators, parts)
        repetition = tcgen05.Repetition(_READ_COLUMNS)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(repetition), cutlass.Float32)
        read = tcgen05.make_tmem_copy(atom, accumulators[None, None, 0, 0, 0])
        source = read.get_slice(thread).partition_S(accumulators)
        place = read.get_slice(thread).partition_D(
            cute.flat_divide(cute.make_identity_tensor(_UNIT[:2]), parts)
        )
        values = cute.make_rmem_tensor(place[None, None, None, 0, 0].shape, cutlass.Float32)
        rounded = cute.make_rmem_tensor(_READ_COLUMNS, cutlass.BFloat16)
        row, _ = place[None, None, None, 0, 0][0]  # the one that this thread reads
        turn = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, _ACCUMULATORS)
        unit = block
        while unit < units:
            expert, first, rows = self.tile(tiles, unit // bands)
            column = unit % bands * WEIGHT_ROWS
            factor = cutlass.Float32(1.0)
            row_factor = cutlass.Float32(1.0)
            if cutlass.const_expr(self.variant.e4m3_scales):
                # Of a row that is not stored, that of the last one that is.
                at = x_factor + (first + cutlass.min(row, rows - 1))
                row_factor = self.number(at)
            sums.consumer_wait(turn)
            for part in cutlass.range_constexpr(WEIGHT_ROWS // _READ_COLUMNS):
                cute.copy(read, source[None, None, None, 0, part, turn.index], values)
                cute.arch.fence_view_async_tmem_load()
                if cutlass.const_expr(self.variant.e4m3_scales):
                    # Behind N nothing is stored; there is no factor either.
                    index = cutlass.min((column + part * _READ_COLUMNS) // (N // A), A - 1)
                    factor = row_factor * self.number(alpha + (expert * A + index))
                for i in cutlass.range_constexpr(_READ_COLUMNS):
                    rounded[i] = (values[i] * factor).to(cutlass.BFloat16)
                if row < rows:
                    self.store_row(rounded, out, first + row, column + part * _READ_COLUMNS, N)
            sums.consumer_release(turn)
            turn.advance()
            unit += grid

    @cute.jit
    def number(self, pointer):
        """What is at `pointer`."""
        return cute.make_tensor(pointer, cute.make_layout(1))[0]

    @cute.jit
    def store_row(self, rounded, out, row, column, N):
        """Store the columns from `column` on that are less than N, 16 bytes at a time."""
        for i in cutlass.range_constexpr(_READ_COLUMNS // _CHUNK):
            if column + i * _CHUNK < N:
                address = out.toint() + 2 * (cutlass.Int64(row) * N + column + i * _CHUNK)
                to = cute.make_ptr(
                    cutlass.BFloat16, address, cute.AddressSpace.gmem, assumed_align=16
                )
                cute.autovec_copy(
                    cute.local_tile(rounded, (_CHUNK,), (i,)),
                    cute.make_tensor(to, cute.make_layout(_CHUNK)),
                )


# What profilers show, with a number behind it.
_GroupedGemm.kernel.set_name_prefix(
    "cutlass_sm100_fp4_grouped_gemm", remove_cutlass_symbol=True, keep_mangled_name=False
)
