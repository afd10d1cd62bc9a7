from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.fp8_block import fp8_quantize_permute
from moequant.kernels.fp8_block.fp8_quantize_permute import FEW_SLOTS, prepare, sort_and_quantize
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.routing import (
    ONE_LAUNCH_SLOTS,
    Grouping,
    SortedRouting,
    max_rows,
    sort_routing,
)
from moequant.runtime.activations import quantize_activations

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
E, T = 8, 3


def call(x, ids, alignment=1, expert_map=None):
    """Routing, rows and scales of a call."""
    slots, H = ids.numel(), x.shape[1]
    grouping = Grouping(experts=E, alignment=alignment, tile_rows=16)
    routing = SortedRouting.allocate(slots, grouping, device=DEVICE)
    count = max_rows(slots, E, alignment)
    rows = torch.zeros(count, H, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.full((-(-H // 128), -(-count // 4) * 4), torch.nan, device=DEVICE)
    prepare(x, ids, routing, rows, scale, grouping, expert_map=expert_map)
    return routing, rows, scale


def inputs(tokens, hidden, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :T].int().contiguous()
    ids[0, 1] = -1
    x = (torch.randn(tokens, hidden, generator=g) * 3).to(dtype)
    x[-1, :128] = 0
    return x.to(DEVICE), ids.to(DEVICE)


def check_rows(x, ids, routing, rows, scale):
    # Equal to the last bit: both divide by 448 and by the scale, and round to nearest even.
    want = quantize_activations(x, "fp8_group128")
    row = routing.row_of_slot.reshape(ids.shape)
    assert torch.equal(row >= 0, (ids >= 0) & (ids < E))
    token = torch.arange(len(x), device=DEVICE)[:, None].expand_as(row)[row >= 0]
    row = row[row >= 0].long()
    assert row.unique().numel() == row.numel()
    bits, want_bits = rows.view(torch.uint8), want.qdata.view(torch.uint8)
    assert torch.equal(bits[row], want_bits[token])
    assert torch.equal(scale[:, row].T, want.scale[token])


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 128), (5, 320), (33, 256)])
def test_rows_hold_the_quantized_token_of_their_slot(tokens, hidden, alignment):
    x, ids = inputs(tokens, hidden)
    check_rows(x, ids, *call(x, ids, alignment))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_hidden_states_of_every_dtype_are_read_as_they_are(dtype):
    x, ids = inputs(5, 256, dtype)
    check_rows(x, ids, *call(x, ids))


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_one_launch_sorts_as_the_sort_alone(tokens):
    x, ids = inputs(tokens, 128)
    ids[-1, 0] = E
    expert_map = torch.tensor([7, 2, -1, 0, 1, -1, 5, 3, 6], device=DEVICE)
    for known in (None, expert_map):
        routing, _, _ = call(x, ids, expert_map=known)
        assert ids.numel() <= FEW_SLOTS
        grouping = Grouping(experts=E, tile_rows=16)
        alone = SortedRouting.allocate(ids.numel(), grouping, device=DEVICE)
        sort_routing(ids, alone, grouping, expert_map=known)
        assert torch.equal(routing.row_of_slot, alone.row_of_slot)
        assert torch.equal(routing.tile_count, alone.tile_count)
        count = int(alone.tile_count)
        assert torch.equal(routing.tiles[:count], alone.tiles[:count])


@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [(1, 128), (40, 1200), pytest.param(ONE_LAUNCH_SLOTS // T + 9, 144, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("beside", [False, True])
def test_tokens_quantized_beside_the_sort_stay_in_their_order(tokens, hidden, beside, monkeypatch):
    if not beside:
        monkeypatch.setattr(fp8_quantize_permute, "BESIDE_SLOTS", 0)
    x, ids = inputs(tokens, hidden)
    grouping = Grouping(experts=E, tile_rows=16, extra_rows=2)
    routing, alone = (
        SortedRouting.allocate(ids.numel(), grouping, device=DEVICE) for _ in range(2)
    )
    for part in (routing.tiles, alone.tiles):
        part.fill_(-1)
    codes = torch.zeros(tokens, hidden, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.full((tokens, -(-hidden // 512) * 4), torch.nan, device=DEVICE)
    sort_and_quantize(x, ids, routing, codes, scale, grouping)
    sort_routing(ids, alone, grouping)
    for name in ("row_of_slot", "row_end", "tiles", "tile_count", "units_taken"):
        assert torch.equal(getattr(routing, name), getattr(alone, name)), name
    here = int((ids >= 0).sum())
    assert torch.equal(routing.slot_of_row[:here], alone.slot_of_row[:here])
    want = quantize_activations(x, "fp8_group128")
    assert torch.equal(codes.view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(scale[:, : -(-hidden // 128)], want.scale)
