"""What workers get of a shard: every item once, in order, small units together."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from moequant.conversion.batches import BATCH_BYTES, Batches
from moequant.conversion.stack import Stack
from moequant.conversion.units import Copy, Unit, Weight
from moequant.storage.headers import TensorInfo
from moequant.weights.encoded import EncodedInfo

STACK = Stack(tensor="experts.down_proj", expert=0, experts=4, interleaved=False)


def tensor(name, N, K):
    return TensorInfo(
        name=name, dtype="BF16", shape=(N, K), file="model.safetensors", start=0, stop=2 * N * K
    )


def unit(name, N=64, K=128, stack=None, info=None):
    weight = Weight(info=info or tensor(f"{name}.weight", N, K), role="down")
    return Unit(weights=(weight,), format="mxfp4", options={}, stack=stack)


def encoded(name):
    return EncodedInfo(
        module=name,
        shape=(64, 128),
        format="fp8_block",
        dialect=None,
        places={},
        parts=(),
        size_bytes=64 * 128,
    )


def taken(batches):
    while batch := batches.take():
        yield batch


def test_small_units_are_taken_together():
    items = [unit(f"expert{i}") for i in range(100)]
    batches = Batches(items, workers=1)
    first = batches.take()
    assert first == [(i, items[i]) for i in range(len(first))]
    assert len(first) > 1


def test_what_is_taken_together_is_no_larger_than_a_batch():
    # 0.53 bytes a weight: three are too much.
    items = [unit(f"expert{i}", N=1024, K=2048) for i in range(40)]
    sizes = [sum(u.result_bytes for _, u in batch) for batch in taken(Batches(items, 1))]
    assert max(sizes) <= BATCH_BYTES < 3 * items[0].result_bytes
    assert max(sizes) == 2 * items[0].result_bytes


def test_a_unit_larger_than_a_batch_comes_alone():
    items = [unit(f"expert{i}", N=4096, K=2048) for i in range(40)]
    assert items[0].result_bytes > BATCH_BYTES
    assert [len(batch) for batch in taken(Batches(items, 1))] == [1] * 40


@pytest.mark.parametrize(
    "other",
    [
        Copy(info=tensor("norm.weight", 1, 64)),
        unit("stacked", stack=STACK),
        unit("quantized", info=encoded("quantized")),
    ],
    ids=["a copy", "part of a stack", "of a quantized source"],
)
def test_what_is_no_plain_unit_comes_alone(other):
    small = [unit(f"expert{i}") for i in range(40)]
    items = [other, *small[:20], other, *small[20:]]
    batches = [[number for number, _ in batch] for batch in taken(Batches(items, 1))]
    assert batches[0] == [0]
    assert [21] in batches
    assert [number for batch in batches for number in batch] == list(range(len(items)))


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_all_workers_have_something_to_do_until_the_end(workers):
    items = [unit(f"expert{i}") for i in range(100)]
    left = len(items)
    for batch in taken(Batches(items, workers)):
        # A quarter of a worker's share of what is left, but for the last that are one by one.
        assert len(batch) <= max(1, left / (4 * workers))
        left -= len(batch)
    assert left == 0


@pytest.fixture
def _threads_in_turn():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_in_turn")
def test_many_threads_take_each_item_once_and_neighbours_together():
    items = [unit(f"expert{i}") for i in range(2000)]
    for _ in range(10):
        batches = Batches(items, workers=8)
        with ThreadPoolExecutor(8) as pool:
            found = [b for of_one in pool.map(lambda b: [*taken(b)], [batches] * 8) for b in of_one]
        numbers = [[number for number, _ in batch] for batch in found]
        assert all(n == [*range(n[0], n[0] + len(n))] for n in numbers)
        assert sorted(n for batch in numbers for n in batch) == list(range(2000))
        assert all(item is items[number] for batch in found for number, item in batch)


def test_nothing_is_taken_of_what_was_dropped():
    batches = Batches([unit("expert0"), unit("expert1")], workers=1)
    assert batches
    batches.drop()
    assert not batches
    assert batches.take() == []
