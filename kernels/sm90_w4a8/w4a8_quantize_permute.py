"""Quantize rows to FP8, one scale each, and lay tokens in the order of the experts.

rows   float8_e4m3fn [rows, K]
scale  float32       [rows]      amax / 448, 1 where that is 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.fp8_codes import encode_e4m3, scale_of
from moequant.kernels.launch import INTERPRETED, launch, overlaps_launches, wait_for_inputs
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

FEW_SLOTS = 4096
"""Up to so many token-expert pairs, one launch sorts, quantizes and permutes."""

BESIDE_SLOTS = 16384
"""Up to so many, tokens are quantized beside the sort: its registers leave few programs."""

_WARPS = 8


def prepare(
    hidden: Tensor,
    topk_ids: Tensor,
    routing: SortedRouting,
    rows: Tensor,
    scale: Tensor,
    grouping: Grouping,
    *,
    expert_map: Tensor | None = None,
) -> None:
    """Sort the routing, quantize each token, permute: one launch for few pairs, else up to three.

    Args:
        hidden: [M, H] contiguous, bfloat16, float16 or float32.
        topk_ids: [M, T] contiguous int32 or int64.
        routing: written.
        rows: float8_e4m3fn [rows, H], written.
        scale: float32 [rows], written.
        grouping: how `routing` is sorted; alignment 1.
        expert_map: [global experts], see `sort_routing`.
    """
    tokens, topk = topk_ids.shape
    if tokens == 0:
        return
    overlap = overlaps_launches(hidden.device)
    H = hidden.shape[1]
    shared = {
        "H": H,
        "H_PAD": triton.next_power_of_2(H),
        "TOPK": topk,
        "TOPK_PAD": triton.next_power_of_2(topk),
        "NATIVE": not INTERPRETED,
        "OVERLAP": overlap,
    }
    if tokens * topk <= FEW_SLOTS:
        launch(
            prepare_few,
            (tokens + 1,),
            hidden,
            topk_ids,
            topk_ids if expert_map is None else expert_map,
            rows,
            scale,
            routing.row_of_slot,
            routing.tiles,
            routing.tile_count,
            routing.units_taken,
            tokens,
            E=grouping.experts,
            E_PAD=routing.counts.shape[1],
            SLOTS_PAD=triton.next_power_of_2(tokens * topk),
            TILE_ROWS=grouping.tile_rows,
            FIELDS=TILE_FIELDS,
            MAP_SIZE=map_size(expert_map),
            **shared,
            num_warps=_WARPS,
            overlap=overlap,
        )
        return
    sort_routing(topk_ids, routing, grouping, expert_map=expert_map)
    launch(
        quantize_permute,
        (tokens,),
        hidden,
        routing.row_of_slot,
        rows,
        scale,
        **shared,
        num_warps=_WARPS,
        overlap=overlap,
    )


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
        codes: float8_e4m3fn [M, H], written.
        scale: float32 [M], written.
        grouping: how `routing` is sorted.
        expert_map: [global experts], see `sort_routing`.
    """
    tokens, H = hidden.shape
    if tokens == 0:
        return
    overlap = overlaps_launches(hidden.device)
    rows = rows_a_program(tokens, H)
    shared = {
        "ROWS": rows,
        "K": H,
        "K_PAD": triton.next_power_of_2(H),
        "NATIVE": not INTERPRETED,
        "OVERLAP": overlap,
    }
    programs = triton.cdiv(tokens, rows)
    if topk_ids.numel() > BESIDE_SLOTS:
        sort_routing(topk_ids, routing, grouping, expert_map=expert_map)
        launch(
            quantize_tokens,
            (programs,),
            hidden,
            codes,
            scale,
            tokens,
            **shared,
            num_warps=_WARPS,
            overlap=overlap,
        )
        return
    count_chunks(topk_ids, routing, grouping, expert_map)
    arguments, constants = placing(topk_ids, routing, grouping, expert_map)
    launch(
        place_and_quantize,
        (chunks(topk_ids.numel()) + programs,),
        *arguments,
        hidden,
        codes,
        scale,
        tokens,
        **constants,
        **shared,
        num_warps=_WARPS,
        overlap=overlap,
    )


def quantize_rows(x: Tensor, routing: SortedRouting, codes: Tensor, scale: Tensor) -> None:
    """Quantize the rows of `x` that belong to experts.

    Args:
        x: [rows, K] contiguous bfloat16.
        routing: of alignment 1, so that these rows are the first ones.
        codes: float8_e4m3fn [rows, K], written.
        scale: float32 [rows], written.
    """
    overlap = overlaps_launches(x.device)
    R, K = x.shape
    rows = rows_a_program(R, K)
    launch(
        quantize_first,
        (triton.cdiv(R, rows),),
        x,
        routing.tiles,
        routing.tile_count,
        codes,
        scale,
        ROWS=rows,
        K=K,
        K_PAD=triton.next_power_of_2(K),
        FIELDS=TILE_FIELDS,
        NATIVE=not INTERPRETED,
        OVERLAP=overlap,
        num_warps=_WARPS if K > 1024 or rows > 1 else 4,
        overlap=overlap,
    )


def rows_a_program(rows: int, K: int) -> int:
    """A power of two: at most 8192 numbers, and 512 programs or more if there are as many rows."""
    padded: int = triton.next_power_of_2(K)
    most = max(min(8192 // padded, rows // 512), 1)
    return 1 << (most.bit_length() - 1)


def copy_rows(
    qdata: Tensor, scale: Tensor, row_of_slot: Tensor, rows: Tensor, row_scale: Tensor
) -> None:
    """Copy each token, quantized already, to the row of each of its slots.

    Args:
        qdata: float8_e4m3fn [M, H] contiguous.
        scale: float32 [M, 1] contiguous.
        row_of_slot: [M * T] int32, -1 for none.
        rows: float8_e4m3fn [rows, H] contiguous, written.
        row_scale: float32 [rows], written.
    """
    tokens, H = qdata.shape
    overlap = overlaps_launches(qdata.device)
    topk = row_of_slot.shape[0] // tokens
    launch(
        copy_token,
        (tokens,),
        qdata,
        scale,
        row_of_slot,
        rows,
        row_scale,
        H=H,
        H_PAD=triton.next_power_of_2(H),
        TOPK=topk,
        OVERLAP=overlap,
        num_warps=_WARPS,
        overlap=overlap,
    )


@triton.jit
def copy_token(
    qdata,
    scale,
    row_of_slot,
    rows,
    row_scale,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    TOPK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one token."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, H_PAD)
    codes = tl.load(qdata + token * H + col, mask=col < H, other=0.0)
    token_scale = tl.load(scale + token)
    for i in tl.static_range(TOPK):
        row = tl.load(row_of_slot + token * TOPK + i)
        _store(codes, token_scale, row, row >= 0, rows, row_scale, H, H_PAD)


@triton.jit
def _quantize(x, row, K: tl.constexpr, K_PAD: tl.constexpr, NATIVE: tl.constexpr):
    """Codes [K_PAD] and scale of a row of `x`."""
    col = tl.arange(0, K_PAD)
    value = tl.load(x + row * K + col, mask=col < K, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(value), 0))
    return encode_e4m3(tl.math.div_rn(value, tl.zeros([K_PAD], tl.float32) + scale), NATIVE), scale


@triton.jit
def _store(
    codes, row_scale, row, live, rows, scale, K: tl.constexpr, K_PAD: tl.constexpr
):  # fmt: skip
    """Write a quantized row, if it is `live`."""
    col = tl.arange(0, K_PAD)
    tl.store(rows + row.to(tl.int64) * K + col, codes, mask=col < tl.where(live, K, 0))
    tl.store(scale + row, row_scale, mask=live)


@triton.jit
def _quantize_several(
    x,
    codes,
    scale,
    first,
    end,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    EXACT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rows from `first` on, at most ROWS and not beyond `end`, in their places.

    Codes are those of `x / scale`, if EXACT, or of `x * (1 / scale)`, which takes a fifth of the
    instructions, and rounds a few that lie between two codes the other way.
    """
    row = first + tl.arange(0, ROWS)
    col = tl.arange(0, K_PAD)
    live = row < end
    at = row.to(tl.int64)[:, None] * K + col[None, :]
    inside = live[:, None] & (col[None, :] < K)
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
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    FIELDS: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS rows, of those up to the end of the last tile."""
    # From two kernels back or more, so that they may be read while that in front runs.
    count = tl.load(tile_count)
    last = tiles + (count - 1) * FIELDS
    end = tl.load(last + 1, mask=count > 0, other=0) + tl.load(last + 2, mask=count > 0, other=0)
    wait_for_inputs(OVERLAP)
    first = tl.program_id(0) * ROWS
    if first < end:
        _quantize_several(x, codes, scale, first, end, ROWS, K, K_PAD, False, NATIVE)


@triton.jit
def quantize_tokens(
    hidden,
    codes,
    scale,
    tokens,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS tokens."""
    wait_for_inputs(OVERLAP)
    _quantize_several(
        hidden, codes, scale, tl.program_id(0) * ROWS, tokens, ROWS, K, K_PAD, True, NATIVE
    )  # fmt: skip


@triton.jit
def place_and_quantize(
    topk_ids,
    expert_map,
    counts,
    slot_of_row,
    row_of_slot,
    row_end,
    tiles,
    tile_count,
    units_taken,
    slots,
    hidden,
    codes,
    scale,
    tokens,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first programs place pairs, the others quantize ROWS tokens each."""
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    chunks = (slots + CHUNK - 1) // CHUNK
    if program < chunks:
        place_chunk(
            program, topk_ids, expert_map, counts, slot_of_row, row_of_slot, row_end, tiles,
            tile_count, units_taken, slots, E, E_PAD, CHUNK, SLOTS_PAD, ALIGNMENT,
            TILE_ROWS, EXTRA_ROWS, FIELDS, MAP_SIZE,
        )  # fmt: skip
    else:
        _quantize_several(
            hidden, codes, scale, (program - chunks) * ROWS, tokens, ROWS, K, K_PAD, True, NATIVE
        )  # fmt: skip


@triton.jit
def quantize_permute(
    hidden,
    row_of_slot,
    rows,
    scale,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one token, to rows known from the sort."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TOPK_PAD)
    # All at once: behind a store, a load would wait.
    row = tl.load(row_of_slot + token * TOPK + t, mask=t < TOPK, other=-1)
    codes, row_scale = _quantize(hidden, token, H, H_PAD, NATIVE)
    for i in tl.static_range(TOPK):
        this = tl.sum(tl.where(t == i, row, 0), 0)
        _store(codes, row_scale, this, this >= 0, rows, scale, H, H_PAD)


@triton.jit
def prepare_few(
    hidden,
    topk_ids,
    expert_map,
    rows,
    scale,
    row_of_slot,
    tiles,
    tile_count,
    units_taken,
    tokens,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    NATIVE: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program m < M places and quantizes token m; program M writes the tiles.

    A pair's row is the number of pairs that sort before it, which every program counts for itself.
    """
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0)
    slots = tokens * TOPK
    every = tl.arange(0, SLOTS_PAD)
    of = local_expert(topk_ids, expert_map, every, every < slots, E, MAP_SIZE)
    if token == tokens:
        total = tl.histogram(tl.minimum(of, E_PAD - 1), E_PAD, mask=of < E)
        start = tl.cumsum(total, 0) - total
        bins = tl.arange(0, E_PAD)
        write_tiles(
            tiles, tile_count, units_taken, start, total, bins, TILE_ROWS, 0, FIELDS
        )  # fmt: skip
    else:
        t = tl.arange(0, TOPK_PAD)
        slot = token * TOPK + t
        expert = local_expert(topk_ids, expert_map, slot, t < TOPK, E, MAP_SIZE)
        live = expert < E
        sorts_before = (of[None, :] < expert[:, None]) | (
            (of[None, :] == expert[:, None]) & (every[None, :] < slot[:, None])
        )
        row = tl.sum(sorts_before.to(tl.int32), 1)
        tl.store(row_of_slot + slot, tl.where(live, row, -1), mask=t < TOPK)
        codes, row_scale = _quantize(hidden, token.to(tl.int64), H, H_PAD, NATIVE)
        for i in tl.static_range(TOPK):
            this = tl.sum(tl.where(t == i, row, 0), 0)
            here = tl.sum(tl.where((t == i) & live, 1, 0), 0) > 0
            _store(codes, row_scale, this, here, rows, scale, H, H_PAD)
