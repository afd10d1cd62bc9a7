from __future__ import annotations

from task import in_order, with_what_they_need


def test_what_others_need_and_what_is_long_comes_first(tiny):
    tasks = [
        tiny("short"),
        tiny("long", estimate_s=30),
        tiny("last", estimate_s=50, after=("first",)),
        tiny("first", estimate_s=1),
        tiny("wide", estimate_s=20, gpus=2),
    ]
    assert [task.name for task in in_order(tasks)] == ["first", "last", "wide", "long", "short"]


def test_a_task_is_chosen_with_all_it_comes_after(tiny):
    tasks = [tiny("a"), tiny("b", after=("a",)), tiny("c", after=("b",)), tiny("d")]
    assert [task.name for task in with_what_they_need(["c"], tasks)] == ["a", "b", "c"]


def test_without_a_limit_of_its_own_a_task_has_three_times_its_estimate(tiny):
    assert (tiny("a", estimate_s=5).most_s, tiny("b", limit_s=7).most_s) == (15, 7)
