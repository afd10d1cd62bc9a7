"""Tokens quantized by 128 columns and as a whole, in their own order and in that of the experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.launch import INTERPRETED
from moequant.kernels.routing import (
    ONE_LAUNCH_PAIRS,
    Grouping,
    SortedRouting,
    max_rows,
    sort_routing,
)
from moequant.kernels.sm90 import quantize_permute
from moequant.kernels.sm90.quantize_permute import (
    FEW_PAIRS,
    copy_rows,
    prepare,
    quantize_sorted_rows,
    sort_and_quantize,
)
from moequant.runtime.activations import quantize_activations

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
E, T = 8, 3
GROUPING = Grouping(experts=E, tile_rows=16)
every_scheme = pytest.mark.parametrize("scheme", ["fp8_group128", "fp8_token"])


def inputs(tokens, hidden, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :T].int().contiguous()
    ids[0, 1] = -1
    x = (torch.randn(tokens, hidden, generator=g) * 3).to(dtype)
    x[-1, :128] = 0
    return x.to(DEVICE), ids.to(DEVICE)


def routing_of(ids, grouping=GROUPING):
    return SortedRouting.allocate(ids.numel(), grouping, empty=partial(torch.empty, device=DEVICE))


def empty_rows(scheme, count, hidden):
    codes = torch.zeros(count, hidden, dtype=torch.float8_e4m3fn, device=DEVICE)
    shape = (-(-hidden // 128), -(-count // 4) * 4) if scheme == "fp8_group128" else (count,)
    return codes, torch.full(shape, torch.nan, device=DEVICE)


def empty_tokens(scheme, tokens, hidden):
    codes = torch.zeros(tokens, hidden, dtype=torch.float8_e4m3fn, device=DEVICE)
    shape = (tokens, -(-hidden // 512) * 4) if scheme == "fp8_group128" else (tokens,)
    return codes, torch.full(shape, torch.nan, device=DEVICE)


def call(x, ids, scheme, alignment=1, expert_map=None):
    """Routing, rows and scales of a call."""
    grouping = Grouping(experts=E, alignment=alignment, tile_rows=16)
    routing = routing_of(ids, grouping)
    rows, scale = empty_rows(scheme, max_rows(ids.numel(), E, alignment), x.shape[1])
    prepare(x, ids, routing, rows, scale, grouping, expert_map=expert_map)
    return routing, rows, scale


def check_rows(x, ids, scheme, routing, rows, scale):
    # Equal to the last bit: both divide by 448 and by the scale, and round to nearest even.
    want = quantize_activations(x, scheme)
    row = routing.row_of_pair.reshape(ids.shape)
    assert torch.equal(row >= 0, (ids >= 0) & (ids < E))
    token = torch.arange(len(x), device=DEVICE)[:, None].expand_as(row)[row >= 0]
    row = row[row >= 0].long()
    assert row.unique().numel() == row.numel()
    assert torch.equal(as_bytes(rows)[row], as_bytes(want.qdata)[token])
    assert torch.equal(scale.view(-1, scale.shape[-1])[:, row].T, want.scale[token])


def as_bytes(codes):
    return codes.view(torch.uint8)


@every_scheme
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 128), (5, 320), (33, 640)])
def test_rows_hold_the_quantized_token_of_their_pair(
    scheme, tokens, hidden, dtype, apart, monkeypatch
):
    if apart:
        monkeypatch.setattr(quantize_permute, "FEW_PAIRS", dict.fromkeys(FEW_PAIRS, 0))
    x, ids = inputs(tokens, hidden, dtype)
    check_rows(x, ids, scheme, *call(x, ids, scheme))


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 128), (5, 320), (33, 256)])
def test_rows_do_where_experts_begin_at_multiples_of_an_alignment(tokens, hidden):
    x, ids = inputs(tokens, hidden)
    check_rows(x, ids, "fp8_group128", *call(x, ids, "fp8_group128", 128))


@every_scheme
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_one_launch_sorts_as_the_sort_alone(scheme, tokens):
    x, ids = inputs(tokens, 128)
    ids[-1, 0] = E
    expert_map = torch.tensor([7, 2, -1, 0, 1, -1, 5, 3, 6], device=DEVICE)
    for known in (None, expert_map):
        routing, _, _ = call(x, ids, scheme, expert_map=known)
        assert ids.numel() <= min(FEW_PAIRS.values())
        alone = routing_of(ids)
        sort_routing(ids, alone, GROUPING, expert_map=known)
        assert torch.equal(routing.row_of_pair, alone.row_of_pair)
        assert torch.equal(routing.tile_count, alone.tile_count)
        count = int(alone.tile_count)
        assert torch.equal(routing.tiles[:count], alone.tiles[:count])
        assert not routing.units_taken.any()


@pytest.mark.parametrize(
    ("scheme", "tokens", "hidden"),
    [
        ("fp8_group128", 1, 128),
        ("fp8_token", 1, 128),
        ("fp8_group128", 40, 1200),
        ("fp8_token", 19, 640),
        ("fp8_token", 1100, 256),  # two tokens a program
        pytest.param("fp8_group128", ONE_LAUNCH_PAIRS // T + 9, 144, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_tokens_quantized_with_the_sort_stay_in_their_order(
    scheme, tokens, hidden, beside, monkeypatch
):
    if not beside:
        monkeypatch.setattr(quantize_permute, "BESIDE_PAIRS", 0)
    x, ids = inputs(tokens, hidden)
    grouping = Grouping(experts=E, tile_rows=16, extra_rows=2)
    routing, alone = routing_of(ids, grouping), routing_of(ids, grouping)
    for part in (routing.tiles, alone.tiles):
        part.fill_(-1)
    codes, scale = empty_tokens(scheme, tokens, hidden)
    sort_and_quantize(x, ids, routing, codes, scale, grouping)
    sort_routing(ids, alone, grouping)
    for name in ("row_of_pair", "row_end", "tiles", "tile_count", "units_taken"):
        assert torch.equal(getattr(routing, name), getattr(alone, name)), name
    here = int((ids >= 0).sum())
    assert torch.equal(routing.pair_of_row[:here], alone.pair_of_row[:here])
    want = quantize_activations(x, scheme)
    assert torch.equal(as_bytes(codes), as_bytes(want.qdata))
    assert torch.equal(scale.view(tokens, -1)[:, : want.scale.shape[1]], want.scale)


@every_scheme
@pytest.mark.parametrize("hidden", [640, 2176])
def test_quantized_tokens_are_copied_to_the_rows_of_their_experts(scheme, hidden):
    x, ids = inputs(19, hidden)
    routing, _, _ = call(x, ids, scheme)
    q = quantize_activations(x, scheme)
    rows, scale = empty_rows(scheme, ids.numel(), hidden)
    copy_rows(q.qdata, q.scale, routing.row_of_pair, rows, scale)
    check_rows(x, ids, scheme, routing, rows, scale)


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
    codes, scale = empty_rows("fp8_token", ids.numel(), 384)
    quantize_sorted_rows(x, routing, codes, scale)
    want = quantize_activations(x, "fp8_token")
    assert torch.allclose(scale[:used], want.scale[:used, 0], rtol=2**-22, atol=0)
    assert bool(codes[:used].float().isfinite().all())
    off = (as_bytes(codes[1:used]).int() - as_bytes(want.qdata[1:used]).int()).abs()
    assert off.max() <= 1 if off.numel() else True
    assert off.float().mean() < 1e-3 if off.numel() else True
    assert bool(scale[used:].isnan().all())
