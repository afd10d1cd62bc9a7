"""How much work a check of a large checkpoint is: what is counted here, no clock need measure."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager

import pytest

from moequant.compatibility import check_checkpoint, small_tensors
from moequant.models import Architecture
from moequant.storage.checkpoint import Checkpoint

EXPERTS = 32


@contextmanager
def counted_calls():
    """A list of one number: the Python functions that were called, and generators resumed."""
    count = [0]

    def note(frame, event, argument):
        count[0] += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_the_work_grows_as_the_number_of_layers_and_not_as_its_square(converted, format):
    """fp8 lists some modules of every layer, and engines compare every expert with the list."""
    calls = {}
    for layers in (3, 6):
        sizes = {"layers": layers, "experts": EXPERTS, "hidden": 128, "intermediate": 128}
        checkpoint = Checkpoint.open(converted(format, sizes=sizes.items()))
        with counted_calls() as count:
            report = check_checkpoint(checkpoint)
        assert len(report.examined.layers_read) == layers
        calls[layers] = count[0]
    # Three more layers cost as much as the first three, but for what does not depend on them.
    assert calls[6] < 2.1 * calls[3]
    assert calls[6] - calls[3] < 150 * (3 * EXPERTS * 3)


@pytest.mark.parametrize("format", [None, "fp8_block", "nvfp4"])
def test_the_role_of_an_expert_is_looked_for_once(converted, make_checkpoint, monkeypatch, format):
    checkpoint = Checkpoint.open(converted(format) if format else make_checkpoint())
    names = Counter()
    classify = Architecture.classify

    def counted(self, name):
        names[name] += 1
        return classify(self, name)

    monkeypatch.setattr(Architecture, "classify", counted)
    check_checkpoint(checkpoint)
    experts = {name: count for name, count in names.items() if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    assert {*experts.values()} == {1}


def test_scales_of_a_disk_are_read_by_few_tasks(converted, monkeypatch):
    sizes = {"layers": 6, "experts": EXPERTS, "hidden": 128, "intermediate": 128}
    checkpoint = Checkpoint.open(converted("nvfp4", sizes=sizes.items()))
    tasks = []

    class Pool(small_tensors.ThreadPoolExecutor):
        def submit(self, *args, **settings):
            tasks.append(args)
            return super().submit(*args, **settings)

    monkeypatch.setattr(small_tensors, "ThreadPoolExecutor", Pool)
    check_checkpoint(checkpoint)
    assert 1 <= len(tasks) <= 6 * EXPERTS * 3 // 128
