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

from moequant.kernels.fp8_codes import encode_e4m3_bits
from moequant.kernels.launch import overlaps_launches, wait_for_inputs
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
_BLOCK = 2048
_WARPS = 4

_GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
# Of the exponent that scales have, as `moequant.formats.e8m0` has them: what its rule adds to the
# bits of amax, and the exponent of the largest power of two that an element holds.
_ROUND_UP_BITS = {"nvfp4": 0, "mxfp4": 0x200000, "mxfp8": 0x1FFFFF}
_EXPONENTS = {"nvfp4": 0, "mxfp4": 2, "mxfp8": 8}

_SIXTH = tl.constexpr(0.16666667163372040)
_LEAST_GLOBAL_SCALE = tl.constexpr(2.0**-117)
_INF_BITS = tl.constexpr(0x7F800000)
_EXACT_HALVES = tl.constexpr(4194304.0)
"""2**22: float32 from here on are multiples of 0.5, E2M1's smallest step."""


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
    place_scale_rows[(max(triton.cdiv(pairs, _PLACED_PAIRS), 1),)](
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
        launch_pdl=overlap,
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
        routing: which row each pair has.
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
    quantize_pair[(pairs,)](
        x,
        out.codes,
        out.scale,
        out.codes if out.global_scale is None else out.global_scale,
        routing.row_of_pair,
        places.scale_row_of_pair,
        places.expert_of_pair,
        places.scale_offsets if static is None else static,
        out.scale.shape[1],
        K=K,
        TOPK=0 if topk is None else topk,
        STATIC=static is not None,
        SCHEME=out.scheme,
        GROUP=group,
        ROUND_UP=_ROUND_UP_BITS[out.scheme],
        EXPONENT=_EXPONENTS[out.scheme],
        BLOCK=min(_BLOCK, triton.next_power_of_2(max(K, group * _CODES_PER_WORD))),
        NATIVE=has_native_e4m3(x.device),
        OVERLAP=overlap,
        num_warps=_WARPS,
        launch_pdl=overlap,
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


@triton.jit(do_not_specialize=["scale_columns"])
def quantize_pair(
    x,
    codes,
    scale,
    global_scale,
    row_of_pair,
    scale_row_of_pair,
    expert_of_pair,
    static,
    scale_columns,
    K: tl.constexpr,
    TOPK: tl.constexpr,
    STATIC: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    ROUND_UP: tl.constexpr,
    EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: the row of one pair. `scale_columns` is the last extent of `scale`."""
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(0)
    row = tl.load(row_of_pair + pair).to(tl.int64)
    if row < 0:
        return
    source = x + row * K
    if TOPK > 0:
        source = x + (pair // TOPK).to(tl.int64) * K
    GROUPS: tl.constexpr = BLOCK // GROUP
    of_row = 0.0
    if SCHEME == "nvfp4":
        if STATIC:
            of_row = tl.load(static + tl.load(expert_of_pair + pair))
        else:
            of_row = token_scale(source, K, GROUP, BLOCK)
        tl.store(global_scale + row, of_row)
    for first in range(0, K, BLOCK):
        value = load_groups(source, first, K, GROUP, GROUPS)
        amax = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        used = first // GROUP + tl.arange(0, GROUPS) < K // GROUP
        if SCHEME == "nvfp4":
            byte, factor = nvfp4_scale(amax, of_row, NATIVE)
        else:
            byte, factor = e8m0_scale(amax, ROUND_UP, EXPONENT)
        # The codes of a group whose scale is NaN are 0.
        is_nan = byte == (0x7F if SCHEME == "nvfp4" else 0xFF)
        value = value * factor[:, None]
        if SCHEME == "mxfp8":
            code = tl.where(is_nan[:, None], 0, encode_e4m3_byte(value, NATIVE))
            col = first + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            tl.store(codes + row * K + col, code.to(tl.uint8), mask=col < K)
        else:
            code = tl.where(is_nan[:, None], 0, encode_e2m1(value))
            even, odd = tl.split(tl.reshape(code, [GROUPS, GROUP // 2, 2]))
            HALF: tl.constexpr = GROUP // 2
            col = first // 2 + tl.arange(0, GROUPS)[:, None] * HALF + tl.arange(0, HALF)[None, :]
            to = codes + row * (K // 2) + col
            tl.store(to, (even | (odd << 4)).to(tl.uint8), mask=col < K // 2)
        quads = tl.reshape(tl.where(used, byte, 0), [GROUPS // 4, 4])
        word = tl.sum(quads << (tl.arange(0, 4) * 8)[None, :], 1)
        column = first // (GROUP * 4) + tl.arange(0, GROUPS // 4)
        if SCHEME == "mxfp8":
            place = column.to(tl.int64) * scale_columns + row
        else:
            place = tile_place(tl.load(scale_row_of_pair + pair), column, scale_columns)
        tl.store(scale + place, word, mask=column < tl.cdiv(K, GROUP * 4))


@triton.jit
def load_groups(source, first, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """GROUPS groups of columns from `first` on, float32; 0 beyond the last column."""
    col = first + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(source + col, mask=col < K, other=0.0).to(tl.float32)


@triton.jit
def token_scale(source, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The global scale of a row: amax / 2688; NaN where a value is NaN or Inf."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    # Bits of magnitudes have their order, with Inf and then NaN behind them.
    most = tl.zeros([GROUPS], tl.int32)
    for first in range(0, K, BLOCK):
        value = load_groups(source, first, K, GROUP, GROUPS)
        most = tl.maximum(most, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    bits = tl.max(most, 0)
    finite = tl.where(bits < _INF_BITS, bits, 0).to(tl.float32, bitcast=True)
    of_row = tl.maximum(tl.math.div_rn(finite, 2688.0), _LEAST_GLOBAL_SCALE)
    return tl.where(bits < _INF_BITS, of_row, float("nan"))


@triton.jit
def nvfp4_scale(amax, of_row, NATIVE: tl.constexpr):
    """E4M3 scales as int32 bytes, and what to multiply groups by.

    Args:
        amax: int32 [GROUPS], the bits of the largest magnitudes.
        of_row: float32, the global scale.
        NATIVE: whether the device converts E4M3.
    """
    good = tl.where(of_row == of_row, amax, _INF_BITS) < _INF_BITS
    finite = tl.where(good, amax, 0).to(tl.float32, bitcast=True)
    wanted = tl.math.div_rn(1.0, of_row) * (finite * _SIXTH)
    byte = encode_e4m3_bits(tl.where(good, wanted, 0.0))
    number = decode_e4m3(byte, NATIVE) * of_row
    factor = tl.where(byte == 0, 0.0, tl.math.div_rn(1.0, tl.where(byte == 0, 1.0, number)))
    return tl.where(good, byte.to(tl.int32), 0x7F), factor


@triton.jit
def e8m0_scale(amax, ROUND_UP: tl.constexpr, EXPONENT: tl.constexpr):
    """E8M0 scales as int32 bytes, and what to multiply groups by; `amax` as in `nvfp4_scale`."""
    good = amax < _INF_BITS
    exponent = ((tl.where(good, amax, 0) + ROUND_UP) >> 23) - 127 - EXPONENT
    exponent = tl.maximum(exponent, -127)
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(good, exponent + 127, 0xFF), factor


@triton.jit
def encode_e2m1(x):
    """float32 to codes, int32 0 to 15, to nearest even, saturating at 6."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # From 1 on: drop 22 of 23 mantissa bits to nearest even; 1.0 is code 2.
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    below = (magnitude + _EXACT_HALVES).to(tl.int32, bitcast=True) - 0x4A800000
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(magnitude < 1.0, below, normal) | sign


@triton.jit
def tile_place(row, column, columns):
    """Where a word of four scales lies in 128x4 tiles; `columns` are words of a row."""
    tile = (row // 128).to(tl.int64) * columns + column
    return tile * 128 + (row % 32) * 4 + row // 32 % 4
