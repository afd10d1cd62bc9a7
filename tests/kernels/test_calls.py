from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels import calls
from moequant.kernels.calls import MAX_PAIRS, launch_sizes, part_tokens, run_in_parts

H, T = 4, 2


def plan_for(runs):
    """Plans that note their tokens, and whose output tells of every input."""

    def plan(tokens):
        def run(hidden, weights, ids, out, expert_map, scale):
            parts = [hidden, ids, weights, out, *([] if scale is None else [scale])]
            assert {len(part) for part in parts} == {tokens}
            assert all(t.is_contiguous() for t in (*parts, expert_map))
            runs.append(tokens)
            here = (expert_map[ids.long()] * weights).sum(1, keepdim=True)
            out.copy_(hidden.float() * here * (1 if scale is None else scale))

        return run

    return plan


def inputs(tokens):
    """Integers, so that every product and sum of theirs is exact; none contiguous."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randint(-4, 4, (H, tokens), generator=g).float().T
    ids = torch.randint(0, 3, (T, tokens), generator=g).T
    weights = torch.randint(0, 3, (T, tokens), generator=g).float().T
    scale = torch.randint(1, 3, (1, 2 * tokens), generator=g).float().T[::2]
    return hidden, ids, weights, torch.tensor([2, 9, 0, 9, 1])[::2], scale


@pytest.mark.parametrize(("tokens", "runs"), [(1, [1]), (5, [5]), (6, [5, 1]), (13, [5, 5, 3])])
@pytest.mark.parametrize("quantized", [False, True])
def test_parts_make_the_output_of_the_whole(monkeypatch, tokens, runs, quantized):
    hidden, ids, weights, expert_map, scale = inputs(tokens)
    want = hidden * (expert_map[ids] * weights).sum(1, keepdim=True)
    if quantized:
        hidden, want = hidden.to(torch.float8_e4m3fn), (want * scale).bfloat16()
    monkeypatch.setattr(calls, "MAX_PAIRS", 5 * T)
    done = []
    out = torch.empty_like(want, memory_format=torch.contiguous_format)
    run_in_parts(
        plan_for(done),
        hidden,
        weights,
        ids,
        out=out,
        expert_map=expert_map,
        hidden_scale=scale if quantized else None,
    )
    assert done == runs
    assert launch_sizes(tokens, T) == set(runs)
    assert torch.equal(out, want)


@pytest.mark.parametrize(("tokens", "topk"), [(0, 2), (3, 0)])
def test_without_pairs_nothing_runs_and_the_output_is_zero(tokens, topk):
    hidden = torch.ones(tokens, H, dtype=torch.float16)
    ids = torch.zeros(tokens, topk, dtype=torch.int32)
    done = []
    out = torch.ones_like(hidden)
    run_in_parts(
        plan_for(done), hidden, ids.float(), ids, out=out, expert_map=None, hidden_scale=None
    )
    assert done == []
    assert torch.equal(out, torch.zeros_like(hidden))


def test_a_part_is_a_token_at_least_and_a_call_at_most():
    assert part_tokens(7, MAX_PAIRS + 1) == 1
    assert part_tokens(7, 8) == 7
    assert part_tokens(1 << 20, 8) == MAX_PAIRS // 8
