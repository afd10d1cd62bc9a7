"""Quantize rows to NVFP4, MXFP4 or MXFP8 as block-scaled grouped GEMMs read them.

`moequant.runtime.block_scaled` defines the codes and scales. Rows of codes lie dense, sorted by
expert as `moequant.kernels.routing` sorts them. Scales lie in one of two orders:

* NVFP4 and MXFP4: in 128x4 tiles, see `moequant.layouts.swizzle_128x4`, of each expert's rows on
  their own. Each expert's scales start at a row that is a multiple of 128: at `scale_offsets[e]`,
  which adds up the experts' rows in front, each rounded up to 128 (vLLM's blockscale_offsets).
* MXFP8: four to an int32, column-major, see `moequant.layouts.deepgemm_scale`; row r is row r.

Columns of padding are 0. Rows of padding are not written: what a GEMM computes of them is no row of
its result.

Two launches: `place_scales` once a routing, and `quantize_sorted` once a GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from moequant.kernels.launch import INTERPRETED, launch, overlaps_launches, wait_for_inputs
from moequant.kernels.portable.codes import decode_e4m3, encode_e4m3_byte
from moequant.kernels.portable.portable_grouped_gemm import has_native_e4m3
from moequant.kernels.routing import Grouping, SortedRouting, local_expert, map_size, max_rows

if TYPE_CHECKING:
    from collections.abc import Callable

TILE_ROWS = 128
"""Rows of a tile of scales, to which those of each expert are padded."""
_CODES_PER_WORD = 4
_PLACED_PAIRS = 128
"""Pairs of a program of `place_scales`."""
_WARPS = 4
_THREAD_BYTES, _REGISTERS = 224, 96
"""Of a row, the most that a thread of `quantize_block_scaled_row` holds in registers, and how many
registers it may use.
So an H200 has 10 rows of 7168 columns in flight on each multiprocessor."""

_GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
# Of the exponent that scales have, as `moequant.formats.e8m0` has them: what its rule adds to the
# bits of amax, and the exponent of the largest power of two that an element holds.
_ROUND_UP_BITS = {"nvfp4": 0, "mxfp4": 0x200000, "mxfp8": 0x1FFFFF}
_EXPONENTS = {"nvfp4": 0, "mxfp4": 2, "mxfp8": 8}

_IN_PYTHON = tl.constexpr(INTERPRETED)
_SIXTH = tl.constexpr(0.16666667163372040)
_LEAST_GLOBAL_SCALE = tl.constexpr(2.0**-117)
_INF_BITS = tl.constexpr(0x7F800000)
_UNIT = tl.constexpr(8388608.0)
_UNIT_BITS = tl.constexpr(0x4B000000)
"""2**23: float32 from here on are integers, which their last bits count."""
_TENTH = tl.constexpr(0.09999999403953552)
"""The float32 below 0.1: its product with 5 is below 0.5, and that with the next float32 above."""
_TILE_WORDS = tl.constexpr(128)


@dataclass(frozen=True, kw_only=True)
class ScalePlaces:
    """Where the scales of a routing's rows lie, and where experts begin.

    Attributes:
        expert_offsets: [E + 1] int32, the first row of each expert, and the last one's end.
        scale_offsets: [E + 1] int32, the first row of each expert's scales, a multiple of 128, and
            the end of the last one's.
        scale_row_of_pair: [pairs] int32; not written where the expert is not here.
        expert_of_pair: [pairs] int32, E where it is not here.
    """

    expert_offsets: Tensor
    scale_offsets: Tensor
    scale_row_of_pair: Tensor
    expert_of_pair: Tensor

    @staticmethod
    def allocate(pairs: int, experts: int, *, empty: Callable[..., Tensor]) -> ScalePlaces:
        """Room for any routing of `pairs` pairs.

        Args:
            pairs: how many.
            experts: E.
            empty: makes a tensor of a shape and `dtype`, such as `WorkspaceArena.empty`.
        """
        return ScalePlaces(
            expert_offsets=empty(experts + 1, dtype=torch.int32),
            scale_offsets=empty(experts + 1, dtype=torch.int32),
            scale_row_of_pair=empty(pairs, dtype=torch.int32),
            expert_of_pair=empty(pairs, dtype=torch.int32),
        )


@dataclass(frozen=True, kw_only=True)
class BlockScaledRows:
    """Rows of activations, quantized and sorted by expert.

    Attributes:
        scheme: "nvfp4", "mxfp4" or "mxfp8".
        codes: uint8, [R, K / 2] of E2M1, two a byte, the even column low, or [R, K] of E4M3.
        scale: int32, four scales each, column after column: nvfp4 and mxfp4 [padded rows,
            ceil(columns of scales / 4)] in 128x4 tiles; mxfp8 [ceil(K / 128), ceil4(R)].
        global_scale: nvfp4: [R] float32; else None.
    """

    scheme: str
    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None

    @staticmethod
    def allocate(
        scheme: str, rows: int, K: int, experts: int, *, empty: Callable[..., Tensor]
    ) -> BlockScaledRows:
        """Room for `rows` rows of K columns in any distribution over `experts` experts.

        Args:
            scheme: "nvfp4", "mxfp4" or "mxfp8".
            rows: R.
            K: columns, a multiple of 16 (nvfp4) or 32.
            experts: E.
            empty: as for `ScalePlaces.allocate`.
        """
        words = -(-K // (_GROUPS[scheme] * _CODES_PER_WORD))
        if scheme == "mxfp8":
            shape = (words, -(-rows // 4) * 4)
        else:
            shape = (max_rows(rows, experts, TILE_ROWS), words)
        return BlockScaledRows(
            scheme=scheme,
            codes=empty(rows, K if scheme == "mxfp8" else K // 2, dtype=torch.uint8),
            scale=empty(*shape, dtype=torch.int32),
            global_scale=empty(rows, dtype=torch.float32) if scheme == "nvfp4" else None,
        )


def place_scales(
    topk_ids: Tensor,
    routing: SortedRouting,
    out: ScalePlaces,
    grouping: Grouping,
    *,
    expert_map: Tensor | None = None,
) -> None:
    """Find where the scales of every pair's row lie.

    Args:
        topk_ids: [M, T] int32 or int64 contiguous.
        routing: what `sort_routing` made of them.
        out: is written.
        grouping: with which they were sorted.
        expert_map: with which they were sorted.
    """
    pairs, experts = topk_ids.numel(), grouping.experts
    overlap = overlaps_launches(topk_ids.device)
    # Offsets are wanted without any pair, too.
    launch(
        place_scale_rows,
        (max(triton.cdiv(pairs, _PLACED_PAIRS), 1),),
        topk_ids,
        topk_ids if expert_map is None else expert_map,
        routing.row_of_pair,
        routing.row_end,
        out.expert_offsets,
        out.scale_offsets,
        out.scale_row_of_pair,
        out.expert_of_pair,
        pairs,
        E=experts,
        E_PAD=triton.next_power_of_2(experts),
        ALIGNMENT=grouping.alignment,
        TILE=TILE_ROWS,
        CHUNK=_PLACED_PAIRS,
        MAP_SIZE=map_size(expert_map),
        OVERLAP=overlap,
        num_warps=_WARPS,
        overlap=overlap,
    )


def quantize_sorted(
    x: Tensor,
    out: BlockScaledRows,
    routing: SortedRouting,
    places: ScalePlaces,
    *,
    topk: int | None = None,
    static: Tensor | None = None,
) -> None:
    """Quantize the row of every pair whose expert is here.

    Args:
        x: contiguous bfloat16, float16 or float32: [M, K] of tokens, with `topk`; or [R, K] of
            rows that are sorted by expert. K is a multiple of 16 (nvfp4) or 32.
        out: is written, at the rows of `routing`.
        routing: which row each pair has and, unless T > 1, which pair each row; gaps hold anything.
        places: of `place_scales`.
        topk: T, where `x` has one row for the T pairs of a token.
        static: nvfp4: the global scales, [E] float32; None, and they are computed for each row.
    """
    pairs, K = routing.row_of_pair.shape[0], x.shape[1]
    if pairs == 0:
        return
    group = _GROUPS[out.scheme]
    assert K % group == 0
    assert x.is_contiguous()
    overlap = overlaps_launches(x.device)
    warps = triton.next_power_of_2(triton.cdiv(K * x.element_size(), 32 * _THREAD_BYTES))
    # In the order of pairs, the rows of a token are next to each other and DRAM is read once. In
    # that of rows, those are whose scales share sectors, which DRAM then writes once and whole.
    rows = pairs if topk is not None and topk > 1 else routing.pair_of_row.shape[0]
    launch(
        quantize_block_scaled_row,
        (rows,),
        x,
        out.codes,
        out.scale,
        out.codes if out.global_scale is None else out.global_scale,
        routing.pair_of_row,
        routing.row_of_pair,
        places.scale_row_of_pair,
        places.expert_of_pair,
        places.scale_offsets if static is None else static,
        pairs,
        out.scale.shape[1],
        K=K,
        TOPK=0 if topk is None else topk,
        STATIC=static is not None,
        SCHEME=out.scheme,
        GROUP=group,
        ROUND_UP=_ROUND_UP_BITS[out.scheme],
        EXPONENT=_EXPONENTS[out.scheme],
        PIECES=32 * warps,
        NATIVE=has_native_e4m3(x.device),
        OVERLAP=overlap,
        num_warps=warps,
        overlap=overlap,
        maxnreg=_REGISTERS,
        # Products are rounded before anything is added to them.
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["pairs"])
def place_scale_rows(
    topk_ids,
    expert_map,
    row_of_pair,
    row_end,
    expert_offsets,
    scale_offsets,
    scale_row_of_pair,
    expert_of_pair,
    pairs,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: the experts' offsets, and CHUNK pairs; program 0 writes the offsets."""
    wait_for_inputs(OVERLAP)
    bins = tl.arange(0, E_PAD)
    end = tl.load(row_end + bins, mask=bins < E, other=0)
    before = tl.load(row_end + bins - 1, mask=(bins > 0) & (bins < E), other=0)
    start = tl.cdiv(before, ALIGNMENT) * ALIGNMENT
    room = tl.cdiv(tl.where(bins < E, end - start, 0), TILE) * TILE
    offset = tl.cumsum(room, 0) - room
    if tl.program_id(0) == 0:
        tl.store(expert_offsets + bins, start, mask=bins < E)
        tl.store(expert_offsets + E, tl.max(end, 0))
        tl.store(scale_offsets + bins, offset, mask=bins < E)
        tl.store(scale_offsets + E, tl.sum(room, 0))
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = local_expert(topk_ids, expert_map, pair, pair < pairs, E, MAP_SIZE)
    row = tl.load(row_of_pair + pair, mask=pair < pairs, other=-1)
    scale_row = row + tl.gather(offset - start, tl.minimum(expert, E_PAD - 1), 0)
    tl.store(scale_row_of_pair + pair, scale_row, mask=(expert < E) & (pair < pairs))
    tl.store(expert_of_pair + pair, expert, mask=pair < pairs)


@triton.jit(do_not_specialize=["pairs", "scale_columns"])
def quantize_block_scaled_row(
    x,
    codes,
    scale,
    global_scale,
    pair_of_row,
    row_of_pair,
    scale_row_of_pair,
    expert_of_pair,
    static,
    pairs,
    scale_columns,
    K: tl.constexpr,
    TOPK: tl.constexpr,
    STATIC: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    ROUND_UP: tl.constexpr,
    EXPONENT: tl.constexpr,
    PIECES: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: a row. Program i takes that of pair i if TOPK > 1, else row i.

    Each thread takes whole pieces, 16 columns, PIECES being the number of threads. So it computes
    scales and packs codes on its own. `scale_columns` is the last extent of `scale`.
    """
    wait_for_inputs(OVERLAP)
    CHUNKS: tl.constexpr = (K + PIECES * 16 - 1) // (PIECES * 16)
    if TOPK > 1:
        pair = tl.program_id(0)
        row = tl.load(row_of_pair + pair)
        if row < 0:
            return
        row_of_its_pair = row
        token = pair // TOPK
    else:
        row = tl.program_id(0)
        pair = tl.load(pair_of_row + row)
        # In a gap between experts lies anything: no pair, or one of another row.
        if (pair < 0) | (pair >= pairs):
            return
        row_of_its_pair = tl.load(row_of_pair + pair)
        token = pair if TOPK == 1 else row
    held = load_row(x + token.to(tl.int64) * K, K, PIECES, CHUNKS)
    # Loaded with the row: read later, all codes would wait for it.
    scale_row = row if SCHEME == "mxfp8" else tl.load(scale_row_of_pair + pair)
    amaxes = ()
    for chunk in tl.static_range(CHUNKS):
        amax = largest_of_pieces(held[chunk], x.dtype.element_ty, NATIVE)
        amaxes += (amax,)  # type: ignore[assignment]
    of_row = 1.0
    if SCHEME == "nvfp4":
        if STATIC:
            of_row = tl.load(static + tl.load(expert_of_pair + pair))
        else:
            of_row = token_scale(amaxes, PIECES, CHUNKS)
    # Not before the row is read, which would wait for it.
    if row_of_its_pair != row:
        return
    row = row.to(tl.int64)
    if SCHEME == "nvfp4":
        tl.store(global_scale + row, of_row)
    per_row = reciprocal(of_row) if SCHEME == "nvfp4" else 1.0
    if SCHEME == "mxfp8":
        words = scale + row
        quad_words = scale_columns.to(tl.int64)
    else:
        words = scale + first_of_tiles(scale_row, scale_columns)
        quad_words = _TILE_WORDS
    piece = tl.arange(0, PIECES)
    if SCHEME == "mxfp8":
        to = codes + row * K + piece[:, None] * 16 + tl.arange(0, 16)[None, :]
    else:
        to = codes.to(tl.pointer_type(tl.uint32)) + row * (K // 8)
        to += piece[:, None] * 2 + tl.arange(0, 2)[None, :]
    scale_bytes = ()
    for chunk in tl.static_range(CHUNKS):
        even, odd = numbers(held[chunk], x.dtype.element_ty)
        if SCHEME == "nvfp4":
            byte, factor = nvfp4_scale(amaxes[chunk], of_row, per_row, STATIC, NATIVE)
        else:
            pairs_of_pieces = tl.reshape(amaxes[chunk], [PIECES // 2, 2])
            amax = tl.max(pairs_of_pieces, 1, keep_dims=True)
            amax = tl.reshape(tl.broadcast_to(amax, [PIECES // 2, 2]), [PIECES])
            byte, factor = e8m0_scale(amax, ROUND_UP, EXPONENT)
        scale_bytes += (byte,)  # type: ignore[assignment]
        # The codes of a group whose scale is NaN are 0; a row's own global scale is NaN for all.
        if SCHEME == "nvfp4" and not STATIC:
            is_nan = of_row != of_row
        else:
            is_nan = (byte == (0x7F if SCHEME == "nvfp4" else 0xFF))[:, None]
        even, odd = even * factor[:, None], odd * factor[:, None]
        if SCHEME == "mxfp8":
            value = tl.reshape(tl.join(even, odd), [PIECES, 16])
            code = tl.where(is_nan, 0, encode_e4m3_byte(value, NATIVE)).to(tl.uint8)
        else:
            low, high = encode_e2m1(even, STATIC), encode_e2m1(odd, STATIC)
            word = pack_e2m1(low, high, signs(held[chunk], x.dtype.element_ty))
            code = tl.where(is_nan, 0, word)
        mask = (chunk * PIECES + piece)[:, None] < K // 16
        tl.store(to + chunk * PIECES * to.shape[1], code, mask=mask)
    store_scales(scale_bytes, words, quad_words, K, GROUP, PIECES, CHUNKS)


@triton.jit
def store_scales(
    scale_bytes,
    words,
    quad_words,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store a row's scales, int32 bytes [PIECES] of each chunk: four every `quad_words` words.

    The threads that have a quad's bytes of four chunks get a whole one each, and store it at once.
    """
    THREADS: tl.constexpr = GROUP // 16
    QUADS: tl.constexpr = PIECES // THREADS // 4
    piece = tl.arange(0, PIECES)
    group = piece // THREADS
    quad = group % 4 * QUADS + group // 4
    to = words + quad * quad_words
    for first in tl.static_range(0, CHUNKS, 4):
        packed = tl.zeros([PIECES], tl.uint32)
        for i in tl.static_range(4):
            if first + i < CHUNKS:
                here = ((first + i) * PIECES + piece) // THREADS < K // GROUP
                packed |= tl.where(here, scale_bytes[first + i], 0).to(tl.uint32) << i * 8
        word = transposed(packed, THREADS).to(tl.int32, bitcast=True)
        mask = (piece % THREADS == 0) & (first * QUADS + quad < (K // GROUP + 3) // 4)
        tl.store(to + first * QUADS * quad_words, word, mask=mask)


@triton.jit
def transposed(words, THREADS: tl.constexpr):
    """uint32 [PIECES]: every four, THREADS apart, are rows of 4 x 4 bytes, and become columns.

    The rows are in threads of one warp, which need no shared memory for this.
    """
    SHAPE: tl.constexpr = [words.shape[0] // THREADS // 4, 4, THREADS]
    row = tl.broadcast_to(tl.arange(0, 4)[None, :, None], SHAPE)
    own = tl.reshape(words, SHAPE)
    # First every 2 x 2 bytes, then those by 2 x 2.
    own = pick_bytes(own, tl.gather(own, row ^ 1, 1), tl.where(row % 2 == 0, 0x6240, 0x3715))
    own = pick_bytes(own, tl.gather(own, row ^ 2, 1), tl.where(row < 2, 0x5410, 0x3276))
    return tl.reshape(own, words.shape)


@triton.jit
def pick_bytes(a, b, places):
    """Four of the eight bytes of two words, one for each four bits of `places`.

    0x6240: byte 0 of `a`, byte 0 of `b`, byte 2 of `a` and byte 2 of `b`.
    """
    if _IN_PYTHON:
        both = a.to(tl.uint64) | b.to(tl.uint64) << 32
        word = tl.zeros_like(both)
        for i in tl.static_range(4):
            place = (places >> i * 4 & 7).to(tl.uint64)
            word |= (both >> place * 8 & 0xFF) << i * 8
        return word.to(tl.uint32)
    asm: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, places], tl.uint32, True, 1)


@triton.jit
def load_row(source, K: tl.constexpr, PIECES: tl.constexpr, CHUNKS: tl.constexpr):
    """Words of a row, a tensor [PIECES, words of 16 columns] for each chunk; 0 beyond column K.

    A thread has a piece; loads are of 16 bytes.
    """
    WORDS: tl.constexpr = source.dtype.element_ty.primitive_bitwidth // 2
    words = source.to(tl.pointer_type(tl.uint32))
    held = ()
    for chunk in tl.static_range(CHUNKS):
        piece = chunk * PIECES + tl.arange(0, PIECES)[:, None]
        mask = piece < K // 16
        # In quarters or halves: of one load of more words than 4, a thread would not take them all.
        at = words + piece * WORDS + tl.arange(0, 4)[None, :]
        both = tl.join(tl.load(at, mask, other=0), tl.load(at + 4, mask, other=0))
        if WORDS == 16:
            others = tl.join(tl.load(at + 8, mask, other=0), tl.load(at + 12, mask, other=0))
            taken = tl.permute(tl.join(both, others), (0, 3, 2, 1))
        else:
            taken = tl.permute(both, (0, 2, 1))
        held += (tl.reshape(taken, [PIECES, WORDS]),)  # type: ignore[assignment]
    return held


@triton.jit
def largest_of_pieces(words, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """The bits of the largest magnitude of each piece, as float32, int32 [PIECES].

    Bits of magnitudes have their order, with Inf and then NaN behind them.
    """
    if dtype == tl.float32:
        bits = tl.max((words & 0x7FFFFFFF).to(tl.int32), 1)
    else:
        w0, w1, w2, w3 = quarters(words)
        a, b = tl.split(larger(larger(w0, w1, NATIVE), larger(w2, w3, NATIVE), NATIVE))
        both = larger(a, b, NATIVE)
        most = larger(both, both << 16, NATIVE) >> 16 & 0x7FFF
        bits = float32_of(most, dtype).to(tl.int32, bitcast=True)
    return bits


_LARGER = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
_LARGER_BEFORE_SM89 = tl.constexpr(
    """{
    .reg .b32 left, right;
    abs.bf16x2 left, $1;
    abs.bf16x2 right, $2;
    max.NaN.bf16x2 $0, left, right;
    }"""
)


@triton.jit
def larger(a, b, NATIVE: tl.constexpr):
    """The larger magnitudes of two words' numbers, by halves, with any signs.

    Numbers are bfloat16 or, whose order is the same, float16. float16 that would be NaN as bfloat16
    are NaN, too, and remain that.
    """
    if _IN_PYTHON:
        a, b = a & 0x7FFF7FFF, b & 0x7FFF7FFF
        return tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000) | tl.maximum(a & 0x7FFF, b & 0x7FFF)
    asm: tl.constexpr = _LARGER if NATIVE else _LARGER_BEFORE_SM89
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def float32_of(bits, dtype: tl.constexpr):
    """The number whose bits are the lower half of a word; the upper one is 0."""
    if dtype == tl.bfloat16:
        number = (bits << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def numbers(words, dtype: tl.constexpr):
    """float32 [PIECES, 8], twice: the even columns, and the odd ones."""
    if dtype == tl.float32:
        pairs = tl.reshape(words.to(tl.float32, bitcast=True), [words.shape[0], 8, 2])
        even, odd = tl.split(pairs)
    else:
        even, odd = float32_of(words & 0xFFFF, dtype), float32_of(words >> 16, dtype)
    return even, odd


@triton.jit
def signs(words, dtype: tl.constexpr):
    """uint32 [PIECES, 8]: bit 15 says whether an even column is negative, bit 31 the odd one."""
    if dtype == tl.float32:
        even, odd = tl.split(tl.reshape(words, [words.shape[0], 8, 2]))
        words = (even >> 16) | (odd & 0x80000000)
    return words


@triton.jit
def token_scale(amaxes, PIECES: tl.constexpr, CHUNKS: tl.constexpr):
    """The global scale of a row: amax / 2688; NaN where a value is NaN or Inf."""
    most = tl.zeros([PIECES], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        most = tl.maximum(most, amaxes[chunk])
    bits = tl.max(most, 0)
    finite = tl.where(bits < _INF_BITS, bits, 0).to(tl.float32, bitcast=True)
    of_row = tl.maximum(by_2688(finite), _LEAST_GLOBAL_SCALE)
    return tl.where(bits < _INF_BITS, of_row, float("nan"))


@triton.jit
def nvfp4_scale(amax, of_row, per_row, STATIC: tl.constexpr, NATIVE: tl.constexpr):
    """E4M3 scales as int32 bytes, and what to multiply pieces by.

    Args:
        amax: int32 [PIECES], the bits of the largest magnitudes.
        of_row: float32, the global scale.
        per_row: its reciprocal.
        STATIC: whether `of_row` may be a number though there are NaN or Inf in the row.
        NATIVE: whether the device converts E4M3.
    """
    wanted = per_row * (amax.to(tl.float32, bitcast=True) * _SIXTH)
    if STATIC:
        wanted = tl.where(amax < _INF_BITS, wanted, float("nan"))
    byte = encode_e4m3_byte(wanted, NATIVE)
    number = decode_e4m3(byte, NATIVE) * of_row
    factor = tl.where(byte == 0, 0.0, reciprocal(number))
    return byte.to(tl.int32), factor


_RECIPROCAL = tl.constexpr(
    """{
    .reg .f32 guess, error, negative;
    rcp.approx.ftz.f32 guess, $1;
    neg.f32 negative, $1;
    fma.rn.f32 error, negative, guess, 0f3F800000;
    fma.rn.f32 $0, guess, error, guess;
    }"""
)
_BY_2688 = tl.constexpr(
    """{
    .reg .f32 guess, error;
    mul.rn.f32 guess, $1, 0f39C30C31;
    fma.rn.f32 error, guess, 0fC5280000, $1;
    fma.rn.f32 $0, error, 0f39C30C31, guess;
    }"""
)
"""0f39C30C31 is 1 / 2688, 0fC5280000 -2688."""


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded, for x from 2**-126 to below 2**126, or NaN; for 0 anything.

    A step of Newton's method from the device's approximation, whose error is at most a last bit.
    `rcp.rn.f32` does the same, but branches to treat other numbers, and branches keep groups apart
    that are computed side by side without them.
    """
    if _IN_PYTHON:
        return tl.math.div_rn(1.0, tl.where(x == 0, 1.0, x))
    return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [x], tl.float32, True, 1)


@triton.jit
def by_2688(x):
    """A 2688th of x, correctly rounded from 2**-117 on, and no more below; without a branch."""
    if _IN_PYTHON:
        return tl.math.div_rn(x, 2688.0)
    return tl.inline_asm_elementwise(_BY_2688, "=f,f", [x], tl.float32, True, 1)


@triton.jit
def e8m0_scale(amax, ROUND_UP: tl.constexpr, EXPONENT: tl.constexpr):
    """E8M0 scales as int32 bytes, and what to multiply pieces by; `amax` as in `nvfp4_scale`."""
    good = amax < _INF_BITS
    exponent = ((tl.where(good, amax, 0) + ROUND_UP) >> 23) - 127 - EXPONENT
    exponent = tl.maximum(exponent, -127)
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(good, exponent + 127, 0xFF), factor


@triton.jit
def encode_e2m1(x, SATURATES: tl.constexpr):
    """float32 to the nearest codes of magnitudes, ties to even: bits 0 to 15 of uint32.

    Steps are 0.5 up to 2, 1 up to 4 and 2 up to 6, so codes are the least of three lines. Adding
    2**23 to a line rounds it to an integer, in the last bits. Products with 2 and 0.5 are exact:
    a line is rounded once, fused or not. For NaN any code.

    Unless it SATURATES, magnitudes are below 15. The third line is then 0.1 x + 6, rounded once,
    which is 6 up to x = 5 and 7 from there to 15, so that no code needs to be clamped.
    """
    magnitude = tl.abs(x)
    steep = tl.fma(magnitude, 2.0, _UNIT).to(tl.uint32, bitcast=True)
    middle = (magnitude + (_UNIT + 2.0)).to(tl.uint32, bitcast=True)
    if SATURATES or _IN_PYTHON:
        flat = tl.fma(magnitude, 0.5, _UNIT + 4.0).to(tl.uint32, bitcast=True)
        flat = tl.minimum(flat, _UNIT_BITS + 7)
    else:
        flat = tl.fma(magnitude, _TENTH, _UNIT + 6.0).to(tl.uint32, bitcast=True)
    return tl.minimum(tl.minimum(steep, middle), flat)


_PACK = tl.constexpr(
    """{
    .reg .b32 left, right, sign;
    mad.lo.u32 left, $1, 256, $5;
    mad.lo.u32 right, $2, 256, $6;
    prmt.b32 left, left, right, 0x5410;
    prmt.b32 sign, $9, $10, 0xDF9B;
    lop3.b32 left, sign, 0x08080808, left, 0xEA;
    mul.lo.u32 left, left, 0x1001;
    mad.lo.u32 right, $3, 256, $7;
    mad.lo.u32 sign, $4, 256, $8;
    prmt.b32 right, right, sign, 0x5410;
    prmt.b32 sign, $11, $12, 0xDF9B;
    lop3.b32 right, sign, 0x08080808, right, 0xEA;
    mul.lo.u32 right, right, 0x1001;
    prmt.b32 $0, left, right, 0x7531;
    }"""
)
"""$0: eight codes, of which $1 to $4 are the even ones, $5 to $8 the odd ones, in bits 0 to 15.
$9 to $12 have their signs. Half of the instructions are multiplications, which have units of their
own.

For four codes: a code for each byte, the odd one of two first; the bytes' signs, each in all its
eight bits, of which bit 3 is taken; then every other byte gets the lower half of the one in front
as its upper half.
"""


@triton.jit
def pack_e2m1(even, odd, sign):
    """uint32 [PIECES, 8] of codes of `encode_e2m1`, and of `signs`: uint32 [PIECES, 2]."""
    if _IN_PYTHON:
        low = (even & 7) | ((sign >> 12) & 8)
        byte = low | (odd & 7) << 4 | ((sign >> 24) & 0x80)
        byte = tl.reshape(byte, [byte.shape[0], 2, 4])
        return tl.sum(byte << (tl.arange(0, 4) * 8)[None, None, :], 2)
    e0, e1, e2, e3 = quarters(even)
    o0, o1, o2, o3 = quarters(odd)
    s0, s1, s2, s3 = quarters(sign)
    args = [e0, e1, e2, e3, o0, o1, o2, o3, s0, s1, s2, s3]
    return tl.inline_asm_elementwise(_PACK, "=r,r,r,r,r,r,r,r,r,r,r,r,r", args, tl.uint32, True, 1)


@triton.jit
def quarters(x):
    """Columns 0 and 4, 1 and 5, 2 and 6, 3 and 7 of [PIECES, 8]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def first_of_tiles(row, columns):
    """The word at which scales of a row begin, in 128x4 tiles; `columns` are words of a row."""
    in_tile = (row & 31) * 4 + (row >> 5 & 3)
    return (row >> 7).to(tl.int64) * columns * _TILE_WORDS + in_tile
