"""Files are fetched in the order of their use, readers wait for them, and the budget holds."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from moequant.errors import CheckpointError
from moequant.storage.shard_store import ShardStore, StreamedFile


class Shelf:
    """Fetches files into a folder: each as long as its size, of one letter."""

    def __init__(self, folder, sizes):
        self.folder, self.sizes = folder, sizes
        self.fetched = []
        self.most_bytes = 0
        self.gate = threading.Semaphore(10**6)
        self.lock = threading.Lock()

    def fetch(self, file):
        self.gate.acquire()
        with self.lock:
            self.fetched.append(file)
            there = [path.name for path in self.folder.iterdir()]
            assert file not in there
            self.most_bytes = max(self.most_bytes, sum(self.sizes[f] for f in (file, *there)))
            (self.folder / file).touch()
        time.sleep(0.0005)
        (self.folder / file).write_bytes(file[:1].encode() * self.sizes[file])
        return self.folder / file


@contextmanager
def running(shelf, steps, **settings):
    store = ShardStore(shelf.sizes, [(str(i), used) for i, used in enumerate(steps)], shelf.fetch,
                       **settings)  # fmt: skip
    store.start()
    try:
        yield store
    finally:
        store.stop()


def work(store, steps, first=0):
    """Do all steps from `first` on, one after the other."""
    for number, files in list(enumerate(steps))[first:]:
        for file in files:
            with store.held(file) as found:
                assert found.read(0, 1) == file[:1].encode()
        store.finished(str(number))


def eventually(is_so):
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("not within 5 s")


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path, dict.fromkeys("abcdef", 10))


def test_without_a_budget_files_come_in_the_order_of_use_and_stay(shelf):
    steps = ["c", "ca", "a", "e"]
    with running(shelf, steps) as store:
        store.wait_until_complete()
        work(store, steps)
        assert shelf.fetched == ["c", "a", "e", "b", "d", "f"]
        assert len(list(shelf.folder.iterdir())) == 6


def test_one_shard_is_fetched_ahead_and_used_ones_are_removed_at_once(shelf):
    steps = list("abcdef")
    with running(shelf, steps, budget_bytes=20) as store:
        eventually(lambda: shelf.fetched == ["a", "b"])
        with store.held("a"):
            store.finished("0")
            time.sleep(0.02)
            assert shelf.fetched == ["a", "b"]
            assert (shelf.folder / "a").exists()
        eventually(lambda: shelf.fetched == ["a", "b", "c"])
        assert not (shelf.folder / "a").exists()
        work(store, steps, first=1)
    assert shelf.fetched == steps
    assert shelf.most_bytes == 20


def test_files_that_no_step_reads_are_fetched_once_and_last(shelf):
    with running(shelf, ["b", "a"], budget_bytes=10) as store:
        work(store, ["b", "a"])
        store.wait_until_complete()
        assert shelf.fetched == ["b", "a", "c", "d", "e", "f"]
        eventually(lambda: not list(shelf.folder.iterdir()))


def test_the_file_whose_next_use_is_farthest_makes_room(shelf):
    """By hand: c, which is used last, gives way to b and comes again."""
    shelf.sizes = dict.fromkeys("abc", 10)
    steps = list("acababc")
    with running(shelf, steps, budget_bytes=20) as store:
        work(store, steps)
    assert shelf.fetched == list("acbc")


def test_a_reader_that_waits_comes_before_what_the_steps_need(shelf):
    shelf.gate = threading.Semaphore(0)
    with running(shelf, list("abcd")) as store, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: store.held("f").__enter__().read(0, 10))
        eventually(lambda: store._waiting["f"])
        shelf.gate.release(2)
        assert reading.result(5) == b"f" * 10
        assert shelf.fetched == ["a", "f"]


@pytest.mark.parametrize("seed", range(4))
def test_any_order_with_any_number_of_readers_ends_within_the_budget(tmp_path, seed):
    rng = random.Random(seed)  # noqa: S311
    files = [chr(ord("a") + i) for i in range(12)]
    shelf = Shelf(tmp_path, {file: rng.randint(1, 30) for file in files})
    steps = [rng.sample(files, rng.randint(1, 3)) for _ in range(120)]
    left, lock = list(enumerate(steps))[::-1], threading.Lock()

    def worker():
        while True:
            with lock:
                if not left:
                    return
                number, used = left.pop()
            for file in used:
                with store.held(file) as found:
                    assert found.read(0, found.size_bytes) == file.encode() * shelf.sizes[file]
            store.finished(str(number))

    budget = max(shelf.sizes.values()) + 20 * seed
    with running(shelf, steps, budget_bytes=budget, at_once=1 + seed % 3) as store:
        with ThreadPoolExecutor(1 + seed) as pool:
            for done in [pool.submit(worker) for _ in range(1 + seed)]:
                done.result(30)
        store.wait_until_complete()
    assert shelf.most_bytes <= budget
    assert set(shelf.fetched) == set(files)
    assert max(Counter(shelf.fetched).values()) > 1


@pytest.mark.parametrize("error", [CheckpointError("x: lost"), ZeroDivisionError("bug")])
def test_what_fetching_raises_is_raised_to_every_reader(shelf, error):
    def fetch(file):
        raise error

    shelf.fetch = fetch
    with running(shelf, ["a"]) as store:
        for read in (lambda: store.held("a").__enter__(), store.wait_until_complete):
            with pytest.raises(type(error), match=str(error)):
                read()


def test_a_file_that_is_not_there_afterwards_is_an_error(shelf):
    shelf.fetch = lambda file: shelf.folder / file
    with running(shelf, ["a"]) as store, pytest.raises(CheckpointError, match="a: cannot be read"):
        store.wait_until_complete()


def test_stopping_ends_waits_and_leaves_what_is_there(shelf):
    shelf.gate = threading.Semaphore(1)
    with running(shelf, ["ab"]) as store, ThreadPoolExecutor(1) as pool:
        file = StreamedFile(path=shelf.folder, size_bytes=10, mtime_ns=0, store=store, name="b")
        reading = pool.submit(file.read, 0, 1)
        eventually(lambda: store._waiting["b"])
        file.stop_waiting()
        with pytest.raises(CheckpointError, match="stopped while it was fetched; run the command"):
            reading.result(5)
        shelf.gate.release(10)


def test_once_joined_no_fetch_goes_on(shelf):
    shelf.gate = threading.Semaphore(0)
    with running(shelf, ["a"]) as store, ThreadPoolExecutor(1) as pool:
        eventually(lambda: store._fetching)
        store.stop()
        joined = pool.submit(store.join)
        time.sleep(0.02)
        assert not joined.done()
        shelf.gate.release()
        joined.result(5)
    assert shelf.fetched == ["a"]
    assert [path.name for path in shelf.folder.iterdir()] == ["a"]


def test_a_streamed_file_reads_as_the_file_does(shelf):
    (shelf.folder / "whole").write_bytes(bytes(range(100)))
    shelf.sizes = {"whole": 100}
    shelf.fetch = lambda file: shelf.folder / file
    with running(shelf, []) as store:
        file = StreamedFile(
            path=shelf.folder, size_bytes=100, mtime_ns=0, store=store, name="whole"
        )
        assert not file.is_local
        assert file.read(3, 5) == bytes([3, 4])
        assert file.read_ranges([(0, 2), (98, 100)]) == bytes([0, 1, 98, 99])
        buffers = bytearray(2), bytearray(3)
        file.read_into(10, *map(memoryview, buffers))
        assert buffers == (bytearray([10, 11]), bytearray([12, 13, 14]))
        assert [bytes(chunk) for chunk in file.chunks(0, 5, 2)] == [b"\0\1", b"\2\3", b"\4"]
