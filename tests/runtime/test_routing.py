from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moequant.errors import UnsupportedError
from moequant.runtime.routing import Routing, merge_repeated_experts, permute, reduce, route


def routing_of(ids, *, experts, expert_map=None):
    return route(
        torch.ones(len(ids), len(ids[0])),
        torch.tensor(ids),
        experts=experts,
        expert_map=expert_map,
    )


def test_pairs_are_sorted_by_expert_and_token_with_absent_ones_last():
    routing = routing_of([[2, 0], [-1, 2], [0, 2]], experts=4)
    permutation = permute(routing, 4)
    assert permutation.token.tolist() == [0, 2, 0, 1, 2, 1]
    assert permutation.offsets.tolist() == [0, 2, 2, 5, 5]
    assert permutation.row.tolist() == [[2, 0], [5, 3], [1, 4]]


def test_expert_map_turns_global_ids_into_local_ones():
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    routing = routing_of([[0, 1], [3, -1]], experts=2, expert_map=expert_map)
    assert routing.expert.tolist() == [[-1, 1], [0, -1]]
    assert routing.weight.tolist() == [[0, 1], [1, 0]]


def test_an_empty_expert_map_takes_minus_one_only():
    empty = torch.empty(0, dtype=torch.int64)
    assert routing_of([[-1]], experts=0, expert_map=empty).expert.tolist() == [[-1]]
    with pytest.raises(UnsupportedError, match=r"topk_ids\[0, 0\] is 0"):
        routing_of([[0]], experts=0, expert_map=empty)


@st.composite
def some_ids(draw):
    E, M, T = (draw(st.integers(*ends)) for ends in ((1, 9), (0, 12), (1, 5)))
    ids = draw(st.lists(st.integers(-1, E - 1), min_size=M * T, max_size=M * T))
    return E, torch.tensor(ids, dtype=torch.int64).reshape(M, T)


def test_repeats_of_an_expert_are_merged_into_its_first_pair():
    weight = torch.tensor([[1.0, 2, 4, 8], [1, 2, 4, 8], [0, 2, 0, 8]])
    expert = torch.tensor([[3, 0, 3, 3], [2, 2, 0, 0], [-1, 5, -1, 5]])
    merged = merge_repeated_experts(Routing(expert=expert, weight=weight))
    assert merged.expert.tolist() == [[3, 0, -1, -1], [2, -1, 0, -1], [-1, 5, -1, -1]]
    assert merged.weight.tolist() == [[13, 2, 0, 0], [3, 0, 12, 0], [0, 10, 0, 0]]


@pytest.mark.parametrize("shape", [(5, 8), (5, 1), (0, 3), (2, 0)])
def test_a_routing_without_repeats_is_not_changed_by_merging(shape):
    g = torch.Generator().manual_seed(0)
    expert = torch.rand(shape[0], 9, generator=g).argsort(1)[:, : shape[1]] - 1
    weight = torch.randn(shape, generator=g).masked_fill(expert < 0, 0.0)
    weight[:1, :1] = torch.nan
    merged = merge_repeated_experts(Routing(expert=expert, weight=weight))
    assert torch.equal(merged.expert, expert)
    assert torch.equal(merged.weight.view(torch.int32), weight.view(torch.int32))


@settings(max_examples=100, deadline=None)
@given(some_ids())
def test_every_pair_has_one_row_among_those_of_its_expert(case):
    E, ids = case
    permutation = permute(route(torch.ones(ids.shape), ids, experts=E), E)
    assert sorted(permutation.row.flatten().tolist()) == list(range(ids.numel()))
    for m, pairs in enumerate(ids.tolist()):
        for t, e in enumerate(pairs):
            row = permutation.row[m, t]
            assert permutation.token[row] == m
            if e == -1:
                assert row >= permutation.offsets[E]
            else:
                assert permutation.offsets[e] <= row < permutation.offsets[e + 1]


@settings(max_examples=50, deadline=None)
@given(some_ids())
def test_reduce_is_the_weighted_sum_in_the_order_of_the_pairs(case):
    E, ids = case
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(ids.shape, generator=g)
    routing = route(weights, ids, experts=E)
    permutation = permute(routing, E)
    rows = torch.randn(ids.numel(), 7, generator=g)
    rows[permutation.offsets[E] :] = 0
    result = reduce(rows, routing, permutation)
    for m in range(ids.shape[0]):
        expected = torch.zeros(7)
        for t in range(ids.shape[1]):
            if ids[m, t] >= 0:
                expected = expected + weights[m, t] * rows[permutation.row[m, t]]
        assert torch.equal(result[m], expected)
