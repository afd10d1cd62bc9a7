"""The way through slots, to tensors of the CPU that stand for those of a device."""

from __future__ import annotations

import threading

import pytest
import torch

from moequant.errors import CheckpointError
from moequant.runtime.staging import THREADS, Read, Staging
from moequant.storage.reader import FixedFile

SIZE = 1000


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_bytes(bytes(i * 37 % 251 for i in range(SIZE)))
    return FixedFile.at(tmp_path / "file")


@pytest.fixture(params=["slots", "in place"])
def staging(request):
    return Staging(
        torch.device("meta" if request.param == "slots" else "cpu"), slot_bytes=64, slots=3
    )


def read_of(file, start, size, what=None):
    return Read(
        file=file, start=start, target=torch.full((size,), 255, dtype=torch.uint8), what=what
    )


def assert_right(read):
    stop = read.start + read.target.nbytes
    assert bytes(read.target.tolist()) == bytes(read.file.read(read.start, stop))


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 0)],
        [(0, 1)],
        [(0, 64)],
        [(0, 65)],
        [(0, SIZE)],
        [(0, 10), (10, 20), (30, 34), (64, 64), (128, 0), (128, 1)],  # side by side
        [(0, 10), (12, 50), (62, 60), (200, 3)],  # with gaps
        [(500, 100), (0, 100), (500, 100), (990, 10)],  # back and forth
        [(i * 7, 7) for i in range(100)],  # more than there are slots
    ],
)
def test_every_byte_arrives_where_it_belongs_and_in_order(staging, file, pieces):
    reads = [read_of(file, start, size, what=i) for i, (start, size) in enumerate(pieces)]
    arrived = []
    for read in staging.stream(iter(reads)):
        assert_right(read)
        arrived.append(read.what)
    assert arrived == list(range(len(pieces)))


def test_scalars_and_matrices_keep_shape_and_dtype(staging, file):
    for target in (
        torch.zeros(()),
        torch.zeros(3, 20),
        torch.zeros(2, 4, dtype=torch.float8_e4m3fn),
    ):
        (read,) = staging.stream([Read(file=file, start=8, target=target)])
        wanted = torch.frombuffer(file.read(8, 8 + target.nbytes), dtype=torch.uint8)
        assert read.target is target
        assert torch.equal(target.reshape(-1).view(torch.uint8), wanted)


def requests_of(monkeypatch):
    """What is asked of files, as it is asked."""
    asked = []
    read_into = FixedFile.read_into

    def note(self, start, buffer):
        asked.append((start, len(buffer)))
        read_into(self, start, buffer)

    monkeypatch.setattr(FixedFile, "read_into", note)
    return asked


def test_neighbours_are_read_at_once_and_no_request_is_larger_than_a_slot(file, monkeypatch):
    asked = requests_of(monkeypatch)
    staging = Staging(torch.device("meta"), slot_bytes=64, slots=3)
    list(staging.stream(read_of(file, start, 10) for start in range(0, 200, 10)))
    assert sorted(asked) == [(0, 64), (64, 64), (128, 64), (192, 8)]


def test_far_neighbours_are_not_read_over(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(300_000))
    file = FixedFile.at(tmp_path / "file")
    asked = requests_of(monkeypatch)
    staging = Staging(torch.device("meta"), slot_bytes=1 << 20, slots=3)
    list(staging.stream(read_of(file, start, 10) for start in (0, 60_000, 200_000)))
    assert sorted(asked) == [(0, 60_010), (200_000, 10)]


def test_reads_are_asked_for_a_few_slots_ahead_only(file):
    made = []

    def reads():
        for start in range(0, 960, 64):
            made.append(start)
            yield read_of(file, start, 64)

    staging = Staging(torch.device("meta"), slot_bytes=64, slots=3)
    for done, _ in enumerate(staging.stream(reads()), start=1):
        # Three in slots, one whose chunk was full, and one that did not fit into it.
        assert len(made) <= done + 4


def test_files_are_read_by_several_threads(staging, file, monkeypatch):
    # As many as are on their way at once: fewer would let one wait for reads that wait for it.
    count = len(staging._slots) or THREADS
    together = threading.Barrier(count)
    read_into = FixedFile.read_into

    def wait(self, start, buffer):
        together.wait(timeout=30)
        read_into(self, start, buffer)

    monkeypatch.setattr(FixedFile, "read_into", wait)
    # Two fill a slot.
    for read in staging.stream([read_of(file, 32 * i % 768, 32) for i in range(4 * count)]):
        assert read.target.tolist() != [255] * 32


def test_a_failed_read_is_raised_and_ends_the_threads(staging, file):
    file.path.write_bytes(bytes(SIZE - 1))
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="changed while in use"):
        list(staging.stream(read_of(file, start, 64) for start in range(0, 640, 64)))
    assert threading.active_count() == before


def test_a_stream_that_is_left_ends_its_threads(staging, file):
    before = threading.active_count()
    stream = staging.stream(read_of(file, start, 64) for start in range(0, 640, 64))
    assert_right(next(stream))
    stream.close()
    assert threading.active_count() == before
    (read,) = staging.stream([read_of(file, 5, 100)])
    assert_right(read)
