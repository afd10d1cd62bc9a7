from __future__ import annotations

from placement import Placement


def choose(placement, tasks, now=0.0):
    return [(task.name, gpus) for task, gpus in placement.choose(tasks, now)]


def test_a_timed_task_has_its_gpu_alone_and_others_share_one(tiny):
    shared = [tiny(name, beside=3) for name in "abcd"]
    placement = Placement([0, 1, 2])
    found = choose(placement, [*shared, tiny("timed"), tiny("later")])
    assert found == [("a", [0]), ("b", [0]), ("c", [0]), ("d", [1]), ("timed", [2])]


def test_two_gpus_are_held_for_a_task_that_waits_for_them(tiny):
    placement = Placement([0, 1, 2])
    running = [tiny("x", estimate_s=100), tiny("y", estimate_s=10), tiny("z", estimate_s=20)]
    assert len(choose(placement, running)) == 3
    placement.give_back(running[1])
    wide = tiny("wide", gpus=2, estimate_s=50)
    # GPU 1 is free, and GPU 2 will be in 15 seconds: until then there is time for a short task.
    assert choose(placement, [wide, tiny("long", estimate_s=30)], now=5.0) == []
    assert choose(placement, [wide, tiny("short", estimate_s=12)], now=5.0) == [("short", [1])]
    placement.give_back(tiny("short"))
    placement.give_back(running[2])
    assert choose(placement, [wide], now=20.0) == [("wide", [1, 2])]


def test_a_task_that_waits_for_a_gpu_does_not_stop_those_on_others(tiny):
    placement = Placement([0, 1])
    choose(placement, [tiny("x", beside=2, estimate_s=100)])
    wide = tiny("wide", gpus=2)
    assert choose(placement, [wide, tiny("small", beside=2, estimate_s=50)]) == [("small", [0])]


def test_only_the_first_task_that_waits_holds_gpus(tiny):
    placement = Placement([0, 1, 2, 3])
    choose(placement, [tiny("x", beside=2, estimate_s=100), tiny("y", gpus=2, estimate_s=20)])
    wide = [tiny("wide", gpus=2, estimate_s=50), tiny("as wide", gpus=2, estimate_s=50)]
    choose(placement, [tiny("z", estimate_s=20)])
    # The first has GPUs 1 and 2 in 20 seconds, and the other none: there is room beside x.
    assert choose(placement, [*wide, tiny("small", beside=2, estimate_s=90)]) == [("small", [0])]


def test_small_tasks_go_together(tiny):
    placement = Placement([0, 1])
    choose(placement, [tiny("x"), tiny("a", beside=2)])
    placement.give_back(tiny("x"))
    assert choose(placement, [tiny("b", beside=2), tiny("c")]) == [("b", [1]), ("c", [0])]
