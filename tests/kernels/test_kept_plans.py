from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from moequant.kernels.arena import WorkspaceArena
from moequant.kernels.kept_plans import _MOST, KeptPlans


def memory():
    return torch.empty(16, dtype=torch.uint8)


def test_a_plan_is_made_once_for_a_size_and_an_address():
    plans, workspace, other = KeptPlans(), memory(), memory()
    first = plans.get((3, 2), workspace, object)
    assert plans.get((3, 2), workspace, object) is first
    assert plans.get((3, 2), workspace.view(4, 4), object) is first
    assert plans.get((4, 2), workspace, object) is not first
    assert plans.get((3, 2), other, object) is not first
    assert plans.get((3, 2), workspace, object) is first


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_plans_in_memory_that_is_gone_go_with_the_next_new_one(dtype):
    plans, first, second = KeptPlans(), [memory()], memory()
    for size in range(5):
        plans.get(size, first[0], lambda: WorkspaceArena(first[0]).empty(1, dtype=dtype))
    assert len(plans._kept) == 5
    first.clear()
    gc.collect()
    plans.get(0, second, lambda: WorkspaceArena(second).empty(1, dtype=dtype))
    assert [address for _, address in plans._kept] == [second.data_ptr()]


def test_no_more_than_some_are_kept_and_the_oldest_go_first():
    plans, workspace = KeptPlans(), memory()
    made = [plans.get(size, workspace, object) for size in range(_MOST + 3)]
    assert len(plans._kept) == _MOST
    assert plans.get(_MOST + 2, workspace, object) is made[-1]
    assert plans.get(0, workspace, object) is not made[0]


def test_copies_hold_no_addresses():
    plans, workspace = KeptPlans(), memory()
    plans.get(1, workspace, object)
    assert not copy.deepcopy(plans)._kept
    assert plans.get(1, workspace, object) is not copy.copy(plans).get(1, workspace, object)


def test_threads_get_plans_of_their_own_workspaces():
    plans = KeptPlans()

    def calls(_):
        workspace, seen = memory(), []
        for i in range(2000):
            plan = plans.get(i % 90, workspace, lambda: workspace.data_ptr())
            seen.append(plan == workspace.data_ptr())
        return all(seen), workspace

    with ThreadPoolExecutor(4) as pool:
        assert all(right for right, _ in pool.map(calls, range(4)))
