from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.launch import INTERPRETED
from moequant.kernels.routing import Grouping, SortedRouting, sort_routing
from moequant.kernels.sm90_w4a8 import w4a8_quantize_permute
from moequant.kernels.sm90_w4a8.w4a8_quantize_permute import (
    copy_rows,
    prepare,
    quantize_rows,
    sort_and_quantize,
)
from moequant.runtime.activations import quantize_activations

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
E, T = 8, 3
GROUPING = Grouping(experts=E, tile_rows=16)


def inputs(tokens, hidden, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :T].int().contiguous()
    ids[0, 1] = -1
    x = (torch.randn(tokens, hidden, generator=g) * 3).to(dtype)
    x[-1] = 0
    return x.to(DEVICE), ids.to(DEVICE)


def routing_of(ids):
    return SortedRouting.allocate(ids.numel(), GROUPING, device=DEVICE)


def as_bytes(codes):
    return codes.view(torch.uint8)


def empty_rows(rows, hidden):
    codes = torch.zeros(rows, hidden, dtype=torch.float8_e4m3fn, device=DEVICE)
    return codes, torch.full((rows,), torch.nan, device=DEVICE)


@pytest.fixture
def sorts_apart(monkeypatch):
    monkeypatch.setattr(w4a8_quantize_permute, "FEW_SLOTS", 0)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 128), (19, 640)])
def test_each_token_lies_quantized_in_the_rows_of_its_experts(
    tokens, hidden, dtype, apart, monkeypatch
):
    if apart:
        monkeypatch.setattr(w4a8_quantize_permute, "FEW_SLOTS", 0)
    x, ids = inputs(tokens, hidden, dtype)
    routing, sorted_alone = routing_of(ids), routing_of(ids)
    rows, scale = empty_rows(ids.numel(), hidden)
    prepare(x, ids, routing, rows, scale, GROUPING)
    sort_routing(ids, sorted_alone, GROUPING)
    assert torch.equal(routing.row_of_slot, sorted_alone.row_of_slot)
    count = int(routing.tile_count)
    assert count == int(sorted_alone.tile_count)
    assert torch.equal(routing.tiles[:count], sorted_alone.tiles[:count])
    assert not routing.units_taken.any()
    want = quantize_activations(x, "fp8_token")
    for pair, row in enumerate(routing.row_of_slot.tolist()):
        if row >= 0:
            assert torch.equal(as_bytes(rows[row]), as_bytes(want.qdata[pair // T]))
            assert scale[row] == want.scale[pair // T, 0]


def test_ids_go_through_the_expert_map():
    x, ids = inputs(19, 128)
    here = torch.tensor([-1, 3, 0, -1, 7, 1, 1, 2], device=DEVICE)
    (a, a_scale), (b, b_scale) = (empty_rows(ids.numel(), 128) for _ in range(2))
    a_routing, b_routing = routing_of(ids), routing_of(ids)
    prepare(x, ids, a_routing, a, a_scale, GROUPING, expert_map=here)
    mapped = torch.where(ids >= 0, here[ids.clamp(min=0)], -1).int()
    prepare(x, mapped, b_routing, b, b_scale, GROUPING)
    assert torch.equal(a_routing.row_of_slot, b_routing.row_of_slot)
    assert torch.equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("beside", [0, 1 << 20], ids=["apart", "beside the sort"])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 128), (19, 640), (1100, 256)])
def test_tokens_are_quantized_in_their_own_order(tokens, hidden, beside, monkeypatch):
    monkeypatch.setattr(w4a8_quantize_permute, "BESIDE_SLOTS", beside)
    x, ids = inputs(tokens, hidden)
    routing, sorted_alone = routing_of(ids), routing_of(ids)
    codes, scale = empty_rows(tokens, hidden)
    sort_and_quantize(x, ids, routing, codes, scale, GROUPING)
    sort_routing(ids, sorted_alone, GROUPING)
    assert torch.equal(routing.row_of_slot, sorted_alone.row_of_slot)
    want = quantize_activations(x, "fp8_token")
    assert torch.equal(as_bytes(codes), as_bytes(want.qdata))
    assert torch.equal(scale, want.scale[:, 0])


def test_quantized_tokens_are_copied_to_the_rows_of_their_experts():
    x, ids = inputs(19, 640)
    routing = routing_of(ids)
    want, want_scale = empty_rows(ids.numel(), 640)
    prepare(x, ids, routing, want, want_scale, GROUPING)
    q = quantize_activations(x, "fp8_token")
    rows, scale = empty_rows(ids.numel(), 640)
    copy_rows(q.qdata, q.scale, routing.row_of_slot, rows, scale)
    assert torch.equal(as_bytes(rows), as_bytes(want))
    assert torch.equal(scale, want_scale) or torch.equal(scale[:-1], want_scale[:-1])


@pytest.mark.parametrize("tokens", [1, 19, 400])
def test_rows_of_experts_are_quantized_between_the_gemms(tokens):
    """Codes are those of x * (1 / scale): rarely of a neighbour, and never by more than one code.

    1 / scale and the product are off by 2**-24 each, so a value within 2**-23 of the middle of two
    codes may go either way: of E4M3 codes that lie 2**-4 apart, less than 1 in 10000 values.
    """
    g = torch.Generator().manual_seed(1)
    _, ids = inputs(tokens, 128)
    routing = routing_of(ids)
    sort_routing(ids, routing, GROUPING)
    used = int((ids >= 0).sum())
    x = torch.randn(ids.numel(), 384, generator=g).bfloat16().to(DEVICE)
    x[0] = 1e-37  # the reciprocal of its scale is beyond float32
    codes, scale = empty_rows(ids.numel(), 384)
    quantize_rows(x, routing, codes, scale)
    want = quantize_activations(x, "fp8_token")
    assert torch.allclose(scale[:used], want.scale[:used, 0], rtol=2**-22, atol=0)
    assert bool(codes[:used].float().isfinite().all())
    off = (as_bytes(codes[1:used]).int() - as_bytes(want.qdata[1:used]).int()).abs()
    assert off.max() <= 1 if off.numel() else True
    assert off.float().mean() < 1e-3 if off.numel() else True
    assert bool(scale[used:].isnan().all())
