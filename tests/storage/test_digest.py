from __future__ import annotations

import hashlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from moequant.storage import digest
from moequant.storage.digest import GrowingDigest

CONTENT = random.Random(0).randbytes(100_000)  # noqa: S311 - no secret
CUTS = sorted(random.Random(1).sample(range(1, len(CONTENT)), 60))  # noqa: S311
RANGES = list(zip([0, *CUTS], [*CUTS, len(CONTENT)], strict=True))


@pytest.fixture
def fd(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(digest, "_FLUSH_BYTES", 4000)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def write(fd, growing, start, stop):
    os.pwrite(fd, CONTENT[start:stop], start)
    growing.wrote(start, stop)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("often", [True, False])
def test_ranges_in_any_order_give_the_digest_of_the_file(fd, seed, often):
    growing = GrowingDigest(fd)
    for start, stop in random.Random(seed).sample(RANGES, len(RANGES)):  # noqa: S311
        write(fd, growing, start, stop)
        if often:
            growing.catch_up(len(CONTENT))
    growing.catch_up(len(CONTENT))
    assert growing.of_first(len(CONTENT)) == hashlib.sha256(CONTENT).hexdigest()


def test_threads_that_write_and_digest_at_once_give_the_digest_of_the_file(fd):
    growing = GrowingDigest(fd)

    def work(piece):
        write(fd, growing, *piece)
        growing.catch_up(len(CONTENT))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, RANGES))
    growing.catch_up(len(CONTENT))
    assert growing.of_first(len(CONTENT)) == hashlib.sha256(CONTENT).hexdigest()


def test_nothing_behind_a_hole_is_digested(fd):
    growing = GrowingDigest(fd)
    write(fd, growing, 0, 10)
    write(fd, growing, 20, 30)
    growing.catch_up(len(CONTENT))
    assert growing.of_first(10) == hashlib.sha256(CONTENT[:10]).hexdigest()
    with pytest.raises(AssertionError, match="10 bytes digested of 30"):
        growing.of_first(30)


def test_a_turn_ends_at_its_limit_and_the_next_goes_on_there(fd):
    growing = GrowingDigest(fd)
    write(fd, growing, 0, 5000)
    growing.catch_up(2500)
    assert growing.of_first(2500) == hashlib.sha256(CONTENT[:2500]).hexdigest()
    growing.catch_up(2500)
    assert growing.of_first(5000) == hashlib.sha256(CONTENT[:5000]).hexdigest()


def test_an_empty_range_holds_nothing_up(fd):
    growing = GrowingDigest(fd)
    for start, stop in ((0, 5), (5, 5), (5, 9)):
        write(fd, growing, start, stop)
    growing.catch_up(len(CONTENT))
    assert growing.of_first(9) == hashlib.sha256(CONTENT[:9]).hexdigest()


def test_a_thread_does_not_wait_for_another_that_digests(fd):
    growing = GrowingDigest(fd)
    with growing._digesting:
        write(fd, growing, 0, 10)
        growing.catch_up(len(CONTENT))
        assert growing._digested == 0
    growing.catch_up(len(CONTENT))
    assert growing.of_first(10) == hashlib.sha256(CONTENT[:10]).hexdigest()


def test_a_file_that_was_cut_meanwhile_is_an_error(fd):
    growing = GrowingDigest(fd)
    write(fd, growing, 0, 100)
    os.ftruncate(fd, 50)
    with pytest.raises(OSError, match="is shorter than what was written"):
        growing.catch_up(len(CONTENT))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("often", [True, False])
def test_kept_memory_gives_the_digest_of_the_file_and_is_released_once(fd, seed, often):
    growing, released = GrowingDigest(fd), []
    chance = random.Random(seed)  # noqa: S311
    kept = [piece for piece in RANGES if chance.random() < 0.5]
    for start, stop in chance.sample(RANGES, len(RANGES)):
        if (start, stop) in kept:
            memory = memoryview(CONTENT)[start:stop]
            growing.wrote_from(start, memory, partial(released.append, (start, stop)))
            # Had it read this back, it would have found zeros or the end.
        else:
            write(fd, growing, start, stop)
        if often:
            growing.catch_up(chance.randrange(1, 5000))
    growing.catch_up(len(CONTENT))
    assert growing.of_first(len(CONTENT)) == hashlib.sha256(CONTENT).hexdigest()
    assert released == kept


def test_memory_is_kept_until_it_is_digested(fd):
    growing, released = GrowingDigest(fd), []
    growing.wrote_from(10, memoryview(CONTENT)[10:20], partial(released.append, 10))
    growing.catch_up(len(CONTENT))
    assert released == []
    write(fd, growing, 0, 10)
    growing.catch_up(5)
    assert released == []
    growing.catch_up(len(CONTENT))
    assert released == [10]
    assert growing.of_first(20) == hashlib.sha256(CONTENT[:20]).hexdigest()


def test_a_turn_says_whether_it_ended_at_its_limit(fd):
    growing = GrowingDigest(fd)
    write(fd, growing, 0, 5000)
    assert growing.catch_up(2500)
    assert not growing.catch_up(2501)
    with growing._digesting:
        assert not growing.catch_up(1)
