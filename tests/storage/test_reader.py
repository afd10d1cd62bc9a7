from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from moequant.errors import CheckpointError
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


@pytest.fixture
def _short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: whole(fd, [v[0][:100]], at))


def test_range_is_read(path: Path) -> None:
    assert FixedFile.at(path).read(1000, 3000) == CONTENT[1000:3000]


@pytest.mark.usefixtures("_short_reads")
def test_short_reads_are_continued(path: Path) -> None:
    assert FixedFile.at(path).read(7, 3000) == CONTENT[7:3000]


@pytest.mark.usefixtures("_short_reads")
def test_buffers_are_filled_one_after_the_other(path: Path) -> None:
    buffers = [bytearray(size) for size in (0, 150, 1, 0, 350, 100, 0)]
    FixedFile.at(path).read_into(7, *map(memoryview, buffers))
    assert b"".join(buffers) == CONTENT[7:608]


def test_ranges_are_joined_in_the_order_they_are_asked_for(path: Path) -> None:
    whole = path.read_bytes()
    found = FixedFile.at(path).read_ranges([(5, 9), (0, 3), (7, 7), (2, 10)])
    assert found == whole[5:9] + whole[0:3] + whole[2:10]


def test_any_number_of_buffers_is_filled(path: Path) -> None:
    buffers = [bytearray(3) for _ in range(2000)]
    FixedFile.at(path).read_into(7, *map(memoryview, buffers))
    assert b"".join(buffers) == CONTENT[7:6007]


def test_a_file_that_ends_among_buffers_is_refused(path: Path) -> None:
    buffers = [memoryview(bytearray(100)) for _ in range(3)]
    with pytest.raises(CheckpointError, match="ends at byte 10240, but 10300 bytes are expected"):
        FixedFile.at(path).read_into(10_000, *buffers)


@pytest.mark.parametrize("chunk_bytes", [1, 999, 2000, 10_000])
def test_chunks_make_up_the_range(path: Path, chunk_bytes: int) -> None:
    chunks = [bytes(chunk) for chunk in FixedFile.at(path).chunks(1000, 3000, chunk_bytes)]
    assert b"".join(chunks) == CONTENT[1000:3000]
    assert max(map(len, chunks)) <= chunk_bytes


def test_empty_range_has_no_chunk(path: Path) -> None:
    assert list(FixedFile.at(path).chunks(5, 5, 10)) == []


def test_file_that_ends_early_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="ends at byte 10240, but 10250 bytes are expected"):
        FixedFile.at(path).read(10_000, 10_250)


def test_truncated_and_grown_files_are_refused(path: Path) -> None:
    file = FixedFile.at(path)
    for content in (CONTENT[:-1], CONTENT + b"x"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"changed while in use \(10240 bytes before"):
            file.read(0, 10)


def test_rewritten_file_of_the_same_size_is_refused(path: Path) -> None:
    file = FixedFile.at(path)
    os.utime(path, ns=(0, file.mtime_ns + 1))
    with pytest.raises(CheckpointError, match="changed while in use"):
        file.read(0, 10)


def test_change_between_chunks_is_refused(path: Path) -> None:
    chunks = FixedFile.at(path).chunks(0, 1000, 100)
    next(chunks)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="changed while in use"):
        next(chunks)


def test_removed_file_is_refused(path: Path) -> None:
    file = FixedFile.at(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        file.read(0, 10)


def test_failing_disk_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error; the disk or"):
        FixedFile.at(path).read(0, 10)


def test_no_descriptor_is_left_open(path: Path) -> None:
    file = FixedFile.at(path)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    file.read(0, 10)
    abandoned = file.chunks(0, 1000, 10)
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError):
        file.read(0, 1 << 20)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
