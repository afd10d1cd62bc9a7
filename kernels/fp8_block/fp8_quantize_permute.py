"""Quantize hidden states to FP8 groups of 128 and lay them in the order of the experts.

Each token is read and quantized once, and written to the rows of all its slots.

    rows   float8_e4m3fn [rows, H]
    scale  float32       [ceil(H / 128), row stride]   scale[g, r], as DeepGEMM and our TMA want it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moequant.kernels.fp8_codes import quantize_groups
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

    from moequant.kernels.launch import Relaunch

FEW_SLOTS = 1024
"""Up to here, one launch sorts, quantizes and permutes."""
BESIDE_SLOTS = 16384
"""Up to here, tokens are quantized beside the sort: above, its registers leave too few programs."""

_GROUPS_A_PROGRAM = 16


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
    """Sort the routing, quantize, permute: one launch for few slots and alignment 1, else up to 3.

    Args:
        hidden: [M, H] contiguous, bfloat16, float16 or float32.
        topk_ids: [M, T] contiguous int32 or int64.
        routing: written.
        rows: float8_e4m3fn [rows, H], written but for gaps.
        scale: float32 [ceil(H / 128), row stride], written but for gaps.
        grouping: how `routing` is sorted.
        expert_map: [global experts], see `sort_routing`.

    Returns:
        Of a single launch, see `launch`: its first arguments are `hidden`, `topk_ids`, and
        `expert_map` or again `topk_ids`. None of several.
    """
    tokens, topk = topk_ids.shape
    if tokens == 0:
        return None
    overlap = overlaps_launches(hidden.device)
    H = hidden.shape[1]
    shared = {
        "H": H,
        "TOPK": topk,
        "NATIVE": not INTERPRETED,
        "OVERLAP": overlap,
    }
    if tokens * topk <= FEW_SLOTS and grouping.alignment == 1:
        return launch(
            prepare_few,
            (tokens + 1, -(-H // (128 * _GROUPS_A_PROGRAM))),
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
            scale.stride(0),
            E=grouping.experts,
            E_PAD=routing.counts.shape[1],
            GROUPS=_GROUPS_A_PROGRAM,
            SLOTS_PAD=triton.next_power_of_2(tokens * topk),
            TILE_ROWS=grouping.tile_rows,
            EXTRA_ROWS=grouping.extra_rows,
            TOPK_PAD=triton.next_power_of_2(topk),
            FIELDS=TILE_FIELDS,
            MAP_SIZE=map_size(expert_map),
            **shared,
            num_warps=4,
            overlap=overlap,
        )
    sort_routing(topk_ids, routing, grouping, expert_map=expert_map)
    groups = _groups_a_program(H)
    launch(
        quantize_permute,
        (tokens, -(-H // (128 * groups))),
        hidden,
        routing.row_of_slot,
        rows,
        scale,
        scale.stride(0),
        GROUPS=groups,
        TOPK_PAD=triton.next_power_of_2(topk),
        **shared,
        num_warps=4,
        overlap=overlap,
    )
    return None


def _groups_a_program(H: int) -> int:
    """16 groups of 128, or 8 where 16 would leave half of the last program idle."""
    return 8 if -(-H // (128 * 8)) % 2 else 16


def sort_and_quantize(
    hidden: Tensor,
    topk_ids: Tensor,
    routing: SortedRouting,
    qdata: Tensor,
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
        qdata: float8_e4m3fn [M, H] contiguous, written.
        scale: float32 [M, >= ceil(H / 128)] contiguous, written but for what is behind a token's.
        grouping: how `routing` is sorted.
        expert_map: [global experts], see `sort_routing`.
    """
    tokens, H = hidden.shape
    if tokens == 0:
        return
    groups = _groups_a_program(H)
    parts = -(-H // (128 * groups))
    overlap = overlaps_launches(hidden.device)
    shared = {
        "PARTS": parts,
        "GROUPS": groups,
        "H": H,
        "NATIVE": not INTERPRETED,
        "OVERLAP": overlap,
    }
    if topk_ids.numel() > BESIDE_SLOTS:
        sort_routing(topk_ids, routing, grouping, expert_map=expert_map)
        launch(
            quantize_in_place,
            (tokens * parts,),
            hidden,
            qdata,
            scale,
            scale.stride(0),
            **shared,
            num_warps=4,
            overlap=overlap,
        )
        return
    count_chunks(topk_ids, routing, grouping, expert_map)
    arguments, constants = placing(topk_ids, routing, grouping, expert_map)
    launch(
        place_and_quantize,
        (chunks(topk_ids.numel()) + tokens * parts,),
        *arguments,
        hidden,
        qdata,
        scale,
        scale.stride(0),
        **constants,
        **shared,
        num_warps=8,
        overlap=overlap,
    )


@triton.jit
def quantize_in_place(
    hidden,
    qdata,
    scale,
    scale_stride,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: GROUPS groups of one token, to the token's own place.

    Beside the sort in front, of which nothing is read; all that is in front of that has ended when
    it lets this start. The kernel behind waits for both: for the one program that waits here.
    """
    part = tl.program_id(0)
    _quantize_part(part, hidden, qdata, scale, scale_stride, PARTS, GROUPS, H, NATIVE)
    if part == tl.num_programs(0) - 1:
        wait_for_inputs(OVERLAP)


@triton.jit
def _quantize_part(
    part,
    hidden,
    qdata,
    scale,
    scale_stride,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """GROUPS groups of token `part // PARTS`."""
    token = (part // PARTS).to(tl.int64)
    group = part % PARTS * GROUPS + tl.arange(0, GROUPS)
    codes, group_scale = _quantize(hidden, token, group, H, NATIVE)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(qdata + token * H + col, codes, mask=col < H)
    tl.store(scale + token * scale_stride + group, group_scale, mask=group * 128 < H)


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
    qdata,
    scale,
    scale_stride,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first programs place slots, the others quantize GROUPS groups of a token each."""
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
        _quantize_part(
            program - chunks, hidden, qdata, scale, scale_stride, PARTS, GROUPS, H, NATIVE
        )  # fmt: skip


@triton.jit
def _quantize(hidden, token, group, H: tl.constexpr, NATIVE: tl.constexpr):
    """Codes [groups, 128] and scales [groups] of the groups `group` of a token."""
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(hidden + token.to(tl.int64) * H + col, mask=col < H, other=0.0).to(tl.float32)
    return quantize_groups(x, NATIVE)


@triton.jit
def _scatter(codes, group_scale, row, live, rows, scale, scale_stride, group, H: tl.constexpr):
    """Write a token's groups to one row, if that is `live`."""
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    width = tl.where(live, H, 0)
    tl.store(rows + row.to(tl.int64) * H + col, codes, mask=col < width)
    tl.store(scale + group * scale_stride + row, group_scale, mask=group * 128 < width)


@triton.jit
def quantize_permute(
    hidden,
    row_of_slot,
    rows,
    scale,
    scale_stride,
    GROUPS: tl.constexpr,
    H: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: GROUPS groups of one token, to rows known from the sort."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    t = tl.arange(0, TOPK_PAD)
    # All at once: behind a store, a load would wait.
    row = tl.load(row_of_slot + token * TOPK + t, mask=t < TOPK, other=-1)
    codes, group_scale = _quantize(hidden, token, group, H, NATIVE)
    for i in tl.static_range(TOPK):
        this = tl.sum(tl.where(t == i, row, 0), 0)
        _scatter(codes, group_scale, this, this >= 0, rows, scale, scale_stride, group, H)


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
    scale_stride,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    H: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXTRA_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    NATIVE: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program m < M places token m and quantizes GROUPS groups of it; program M writes the tiles.

    A slot's row is the number of slots that sort before it, which every program counts for itself.
    """
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0)
    slots = tokens * TOPK
    every = tl.arange(0, SLOTS_PAD)
    of = local_expert(topk_ids, expert_map, every, every < slots, E, MAP_SIZE)
    part = tl.program_id(1)
    if token == tokens:
        if part == 0:
            total = tl.histogram(tl.minimum(of, E_PAD - 1), E_PAD, mask=of < E)
            start = tl.cumsum(total, 0) - total
            bins = tl.arange(0, E_PAD)
            write_tiles(
                tiles, tile_count, units_taken, start, total, bins, TILE_ROWS, EXTRA_ROWS, FIELDS
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
        tl.store(row_of_slot + slot, tl.where(live, row, -1), mask=t < tl.where(part == 0, TOPK, 0))
        group = part * GROUPS + tl.arange(0, GROUPS)
        codes, group_scale = _quantize(hidden, token, group, H, NATIVE)
        for i in tl.static_range(TOPK):
            this = tl.sum(tl.where(t == i, row, 0), 0)
            here = tl.sum(tl.where((t == i) & live, 1, 0), 0) > 0
            _scatter(codes, group_scale, this, here, rows, scale, scale_stride, group, H)
