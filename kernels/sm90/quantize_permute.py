"""Quantize tokens to FP8 and lay them in the order of the experts.

A scale covers 128 columns of a token or all of them; the scale tensor's dimensions say which:

                    by 128 columns                               by token
    rows   codes    float8_e4m3fn [rows, H]                      the same
           scale    float32 [ceil(H / 128), row stride]          float32 [rows]
    tokens codes    float8_e4m3fn [M, H]                         the same
           scale    float32 [M, ceil(H / 128) or more]           float32 [M]

"rows" are tokens copied to each of their experts, as DeepGEMM and our TMA read them; "tokens" are
as they come. Each token is read and quantized once. A scale is amax / 448, and 1 where that is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from moequant.kernels.fp8_codes import encode_e4m3, quantize_groups, scale_of
from moequant.kernels.launch import (
    INTERPRETED,
    launch,
    let_next_start,
    overlaps_launches,
    wait_for_inputs,
)
from moequant.kernels.routing import (
    TILE_FIELDS,
    Grouping,
    SortedRouting,
    chunks,
    count_chunks,
    local_expert,
    map_size,
    place_chunk,
    placing,
    sort_routing,
    write_tiles,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.kernels.launch import Relaunch

FEW_PAIRS = {128: 1024, 0: 4096}
"""Up to so many token-expert pairs, one launch sorts, quantizes and permutes; by the columns of a
scale, 0 for all."""
BESIDE_PAIRS = 16384
"""Up to so many, tokens are quantized beside the sort, whose registers leave too few programs for
more."""

_COPIED_COLUMNS = 2048


def group_of(scale: Tensor) -> int:
    """Columns that a scale covers: 128, or 0 for all."""
    return 128 if scale.dim() == 2 else 0


def prepare(
    hidden: Tensor,
    topk_ids: Tensor,
    routing: SortedRouting,
    rows: Tensor,
    scale: Tensor,
    grouping: Grouping,
    *,
    expert_map: Tensor | None = None,
) -> Relaunch | None:
    """Sort the routing, quantize, permute: one launch for few pairs and alignment 1, else up to 3.

    Args:
        hidden: [M, H] contiguous, bfloat16, float16 or float32.
        topk_ids: [M, T] contiguous int32 or int64.
        routing: written.
        rows: codes of the rows, written but for gaps.
        scale: of the rows, written but for gaps.
        grouping: how `routing` is sorted.
        expert_map: [global experts], see `sort_routing`.

    Returns:
        Of a single launch, see `launch`: its first arguments are `hidden`, `topk_ids`, and
        `expert_map` or again `topk_ids`. None of several.
    """
    tokens, topk = topk_ids.shape
    if tokens == 0:
        return None
    H, group = hidden.shape[1], group_of(scale)
    # All of a token in one program, or 16 groups of it.
    groups, width, warps = (16, 128, 4) if group else (1, triton.next_power_of_2(H), _warps(H))
    if tokens * topk <= FEW_PAIRS[group] and grouping.alignment == 1:
        return launch(
            prepare_few,
            (tokens + 1, -(-H // (groups * width))),
            hidden,
            topk_ids,
            topk_ids if expert_map is None else expert_map,
            rows,
            scale,
            routing.row_of_pair,
            routing.tiles,
            routing.tile_count,
            routing.units_taken,
            tokens,
            scale.stride(0),
            E=grouping.experts,
            E_PAD=routing.counts.shape[1],
            PAIRS_PAD=triton.next_power_of_2(tokens * topk),
            TILE_ROWS=grouping.tile_rows,
            EXTRA_ROWS=grouping.extra_rows,
            FIELDS=TILE_FIELDS,
            MAP_SIZE=map_size(expert_map),
            GROUPS=groups,
            WIDTH=width,
            TOPK=topk,
            TOPK_PAD=triton.next_power_of_2(topk),
            **_shared(hidden, warps),
        )
    sort_routing(topk_ids, routing, grouping, expert_map=expert_map)
    if group:
        groups = _groups_a_program(H)
    launch(
        quantize_permute,
        (tokens, -(-H // (groups * width))),
        hidden,
        routing.row_of_pair,
        rows,
        scale,
        scale.stride(0),
        GROUPS=groups,
        WIDTH=width,
        TOPK=topk,
        TOPK_PAD=triton.next_power_of_2(topk),
        **_shared(hidden, warps),
    )
    return None


def _shared(x: Tensor, num_warps: int) -> dict[str, Any]:
    """What launches over `x` have in common."""
    overlap = overlaps_launches(x.device)
    return {
        "H": x.shape[1],
        "NATIVE": not INTERPRETED,
        "OVERLAP": overlap,
        "num_warps": num_warps,
        "overlap": overlap,
    }


def _warps(columns: int) -> int:
    """Of a program that has all columns of a row."""
    return 8 if columns <= 2048 else 16


def _groups_a_program(H: int) -> int:
    """16 groups of 128, or 8 where 16 would leave half of the last program idle."""
    return 8 if -(-H // (128 * 8)) % 2 else 16


def rows_a_program(rows: int, H: int) -> int:
    """A power of two: at most 8192 numbers, and 512 programs or more if there are as many rows."""
    padded: int = triton.next_power_of_2(H)
    most = max(min(8192 // padded, rows // 512), 1)
    return 1 << (most.bit_length() - 1)


def sort_and_quantize(
    hidden: Tensor,
    topk_ids: Tensor,
    routing: SortedRouting,
    codes: Tensor,
    scale: Tensor,
    grouping: Grouping,
    *,
    expert_map: Tensor | None = None,
) -> None:
    """Sort the routing and quantize each token, in their order: one to three launches.

    Args:
        hidden: [M, H] contiguous, bfloat16, float16 or float32.
        topk_ids: [M, T] contiguous int32 or int64.
        routing: written.
        codes: of the tokens, written.
        scale: of the tokens, written but for what is behind a token's.
        grouping: how `routing` is sorted.
        expert_map: [global experts], see `sort_routing`.
    """
    tokens, H = hidden.shape
    if tokens == 0:
        return
    if group := group_of(scale):
        groups, width = _groups_a_program(H), 128
        parts = -(-H // (128 * groups))
        programs = tokens * parts
    else:
        groups, width, parts = rows_a_program(tokens, H), triton.next_power_of_2(H), 0
        programs = triton.cdiv(tokens, groups)
    of_tokens = (hidden, codes, scale, scale.stride(0), tokens)
    cut: dict[str, Any] = {"PARTS": parts, "GROUPS": groups, "WIDTH": width}
    if topk_ids.numel() > BESIDE_PAIRS:
        sort_routing(topk_ids, routing, grouping, expert_map=expert_map)
        warps = 4 if group else 8
        launch(quantize_in_place, (programs,), *of_tokens, **cut, **_shared(hidden, warps))
        return
    count_chunks(topk_ids, routing, grouping, expert_map)
    arguments, constants = placing(topk_ids, routing, grouping, expert_map)
    grid = (chunks(topk_ids.numel()) + programs,)
    shared: dict[str, Any] = {**constants, **cut, **_shared(hidden, 8)}
    launch(place_and_quantize, grid, *arguments, *of_tokens, **shared)


def quantize_sorted_rows(
    x: Tensor, routing: SortedRouting, codes: Tensor, scale: Tensor
) -> Relaunch | None:
    """Quantize the rows of `x` that belong to experts, one scale each.

    Args:
        x: [rows, K] contiguous bfloat16.
        routing: of alignment 1, so that these rows are the first ones.
        codes: float8_e4m3fn [rows, K], written.
        scale: float32 [rows], written.

    Returns:
        See `launch`.
    """
    R, K = x.shape
    rows = rows_a_program(R, K)
    return launch(
        quantize_first,
        (triton.cdiv(R, rows),),
        x,
        routing.tiles,
        routing.tile_count,
        codes,
        scale,
        ROWS=rows,
        WIDTH=triton.next_power_of_2(K),
        FIELDS=TILE_FIELDS,
        **_shared(x, _warps(K) if K > 1024 or rows > 1 else 4),
    )


def copy_rows(
    codes: Tensor, scale: Tensor, row_of_pair: Tensor, rows: Tensor, row_scale: Tensor
) -> None:
    """Copy each token, quantized already, to the row of each of its experts.

    Args:
        codes: float8_e4m3fn [M, H] contiguous.
        scale: float32 [M, ceil(H / 128)] or [M, 1] contiguous.
        row_of_pair: [M * T] int32, -1 for none.
        rows: codes of the rows, written but for gaps.
        row_scale: of the rows, written but for gaps.
    """
    tokens, H = codes.shape
    groups = scale.shape[1]
    overlap = overlaps_launches(codes.device)
    launch(
        copy_token,
        (tokens, triton.cdiv(H, _COPIED_COLUMNS)),
        codes.view(torch.uint8),
        scale,
        row_of_pair,
        rows.view(torch.uint8),
        row_scale,
        row_scale.stride(0),
        H=H,
        GROUPS=groups,
        TOPK=row_of_pair.shape[0] // tokens,
        BLOCK=_COPIED_COLUMNS,
        GROUPS_PAD=triton.next_power_of_2(groups),
        OVERLAP=overlap,
        num_warps=4,
        overlap=overlap,
    )


@triton.jit
def copy_token(
    codes,
    scale,
    row_of_pair,
    rows,
    row_scale,
    scale_stride,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of a token; the first writes its scales too."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + token * H + col, mask=col < H, other=0)
    group = tl.arange(0, GROUPS_PAD)
    groups = tl.where(tl.program_id(1) == 0, GROUPS, 0)
    group_scale = tl.load(scale + token * GROUPS + group, mask=group < groups, other=0.0)
    for t in tl.static_range(TOPK):
        row = tl.load(row_of_pair + token * TOPK + t).to(tl.int64)
        tl.store(rows + row * H + col, code, mask=col < tl.where(row >= 0, H, 0))
        to = row_scale + group * scale_stride + row
        tl.store(to, group_scale, mask=group < tl.where(row >= 0, groups, 0))


@triton.jit
def _quantize(hidden, token, group, H: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr):
    """Codes [groups, WIDTH] and scales [groups] of the groups `group` of a token."""
    col = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(hidden + token.to(tl.int64) * H + col, mask=col < H, other=0.0).to(tl.float32)
    return quantize_groups(x, NATIVE)


@triton.jit
def _scatter(
    codes, group_scale, row, live, rows, scale, scale_stride, group, H: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a token's groups to one row, if that is `live`."""
    col = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    width = tl.where(live, H, 0)
    tl.store(rows + row.to(tl.int64) * H + col, codes, mask=col < width)
    tl.store(scale + group * scale_stride + row, group_scale, mask=group * WIDTH < width)


@triton.jit
def _quantize_rows(
    x,
    codes,
    scale,
    first,
    end,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rows from `first` on, at most ROWS and not beyond `end`, in their places, one scale each.

    Codes are those of `x / scale`, if EXACT, or of `x * (1 / scale)`, which takes a fifth of the
    instructions, and rounds a few that lie between two codes the other way.
    """
    row = first + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    live = row < end
    at = row.to(tl.int64)[:, None] * H + col[None, :]
    inside = live[:, None] & (col[None, :] < H)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    row_scale = scale_of(tl.max(tl.abs(value), 1))
    if EXACT:
        scaled = tl.math.div_rn(value, row_scale[:, None])
    else:
        # The reciprocal of a smaller scale would be Inf, and make NaN of 0.
        scaled = value * tl.math.div_rn(1.0, tl.maximum(row_scale, 1.2e-38))[:, None]
    tl.store(codes + at, encode_e4m3(scaled, NATIVE), mask=inside)
    tl.store(scale + row, row_scale, mask=live)


@triton.jit
def quantize_first(
    x,
    tiles,
    tile_count,
    codes,
    scale,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS rows, of those up to the end of the last tile."""
    # The GEMM behind loads weights meanwhile, wherever the one in front has left an SM.
    let_next_start(OVERLAP)
    # From two kernels back or more, so that they may be read while that in front runs.
    count = tl.load(tile_count)
    last = tiles + (count - 1) * FIELDS
    end = tl.load(last + 1, mask=count > 0, other=0) + tl.load(last + 2, mask=count > 0, other=0)
    wait_for_inputs(OVERLAP)
    first = tl.program_id(0) * ROWS
    if first < end:
        _quantize_rows(x, codes, scale, first, end, ROWS, H, WIDTH, False, NATIVE)


@triton.jit
def _quantize_part(
    program,
    hidden,
    codes,
    scale,
    scale_stride,
    tokens,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """GROUPS groups of the token `program // PARTS`; GROUPS tokens where PARTS is 0."""
    if PARTS == 0:
        first = program * GROUPS
        _quantize_rows(hidden, codes, scale, first, tokens, GROUPS, H, WIDTH, True, NATIVE)
    else:
        token = (program // PARTS).to(tl.int64)
        group = program % PARTS * GROUPS + tl.arange(0, GROUPS)
        code, group_scale = _quantize(hidden, token, group, H, WIDTH, NATIVE)
        col = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(codes + token * H + col, code, mask=col < H)
        tl.store(scale + token * scale_stride + group, group_scale, mask=group * WIDTH < H)


@triton.jit
def quantize_in_place(
    hidden,
    codes,
    scale,
    scale_stride,
    tokens,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: see `_quantize_part`.

    Beside the sort in front, of which nothing is read; all that is in front of that has ended when
    it lets this start. The kernel behind waits for both: for the one program that waits here.
    """
    program = tl.program_id(0)
    _quantize_part(
        program, hidden, codes, scale, scale_stride, tokens, PARTS, GROUPS, WIDTH, H, NATIVE
    )
    if program == tl.num_programs(0) - 1:
        wait_for_inputs(OVERLAP)


@triton.jit
def place_and_quantize(
    topk_ids,
    expert_map,
    counts,
    pair_of_row,
    row_of_pair,
    row_end,
    tiles,
    tile_count,
    units_taken,
    pairs,
    hidden,
    codes,
    scale,
    scale_stride,
    tokens,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first programs place token-expert pairs, the others quantize: see `_quantize_part`."""
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    chunks = (pairs + CHUNK - 1) // CHUNK
    if program < chunks:
        place_chunk(
            program, topk_ids, expert_map, counts, pair_of_row, row_of_pair, row_end, tiles,
            tile_count, units_taken, pairs, E, E_PAD, CHUNK, PAIRS_PAD, ALIGNMENT,
            TILE_ROWS, EXTRA_ROWS, FIELDS, MAP_SIZE,
        )  # fmt: skip
    else:
        _quantize_part(
            program - chunks, hidden, codes, scale, scale_stride, tokens, PARTS, GROUPS, WIDTH, H,
            NATIVE,
        )  # fmt: skip


@triton.jit
def quantize_permute(
    hidden,
    row_of_pair,
    rows,
    scale,
    scale_stride,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: GROUPS groups of one token, to rows known from the sort."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0)
    part = tl.program_id(1) if GROUPS * WIDTH < H else 0
    group = part * GROUPS + tl.arange(0, GROUPS)
    t = tl.arange(0, TOPK_PAD)
    # All at once: behind a store, a load would wait.
    row = tl.load(row_of_pair + token * TOPK + t, mask=t < TOPK, other=-1)
    codes, group_scale = _quantize(hidden, token, group, H, WIDTH, NATIVE)
    for i in tl.static_range(TOPK):
        this = tl.sum(tl.where(t == i, row, 0), 0)
        _scatter(codes, group_scale, this, this >= 0, rows, scale, scale_stride, group, H, WIDTH)


@triton.jit
def prepare_few(
    hidden,
    topk_ids,
    expert_map,
    rows,
    scale,
    row_of_pair,
    tiles,
    tile_count,
    units_taken,
    tokens,
    scale_stride,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program m < M places token m and quantizes GROUPS groups of it; program M writes the tiles.

    A pair's row is the number of pairs that sort before it, which every program counts for itself.
    """
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0)
    pairs = tokens * TOPK
    every = tl.arange(0, PAIRS_PAD)
    of = local_expert(topk_ids, expert_map, every, every < pairs, E, MAP_SIZE)
    part = tl.program_id(1) if GROUPS * WIDTH < H else 0
    if token == tokens:
        if part == 0:
            total = tl.histogram(tl.minimum(of, E_PAD - 1), E_PAD, mask=of < E)
            start = tl.cumsum(total, 0) - total
            bins = tl.arange(0, E_PAD)
            write_tiles(tiles, tile_count, start, total, bins, TILE_ROWS, EXTRA_ROWS, FIELDS)
            tl.store(units_taken + tl.arange(0, 2), tl.zeros([2], tl.int32))
    else:
        t = tl.arange(0, TOPK_PAD)
        pair = token * TOPK + t
        expert = local_expert(topk_ids, expert_map, pair, t < TOPK, E, MAP_SIZE)
        live = expert < E
        sorts_before = (of[None, :] < expert[:, None]) | (
            (of[None, :] == expert[:, None]) & (every[None, :] < pair[:, None])
        )
        row = tl.sum(sorts_before.to(tl.int32), 1)
        tl.store(row_of_pair + pair, tl.where(live, row, -1), mask=t < tl.where(part == 0, TOPK, 0))
        group = part * GROUPS + tl.arange(0, GROUPS)
        codes, group_scale = _quantize(hidden, token, group, H, WIDTH, NATIVE)
        for i in tl.static_range(TOPK):
            this = tl.sum(tl.where(t == i, row, 0), 0)
            here = tl.sum(tl.where((t == i) & live, 1, 0), 0) > 0
            _scatter(codes, group_scale, this, here, rows, scale, scale_stride, group, H, WIDTH)
