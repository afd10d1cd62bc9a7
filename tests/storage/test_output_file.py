"""OutputFile writes large pieces with O_DIRECT.

Where the file system has none, tests use an ordinary descriptor in its place.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moequant.errors import MoequantError
from moequant.storage import direct, output_file
from moequant.storage.buffers import PAGE_BYTES, Arena, tensor_bytes
from moequant.storage.direct import LEAST_BYTES, direct_part, open_direct, write_direct
from moequant.storage.output_file import SHARED_BYTES, OutputFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LARGE = 3 * LEAST_BYTES
EXT4, NFS = 0xEF53, 0x6969


@pytest.fixture(autouse=True)
def direct_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes open_direct succeed on every file system."""

    def opened(path: Path, fd: int) -> int:
        return open_direct(path, fd) or os.open(path, os.O_WRONLY)

    monkeypatch.setattr(output_file, "open_direct", opened)


class Written:
    """How the bytes came into a file: position and count of each call, past the cache and not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.past: list[tuple[int, int]] = []
        self.cached: list[tuple[int, int]] = []
        write_direct, write_all = output_file.write_direct, output_file.write_all

        def wrote_direct(fd: int, position: int, view: memoryview) -> int:
            self.past.append((position, view.nbytes))
            return write_direct(fd, position, view)

        def wrote(fd: int, position: int, view: memoryview) -> None:
            if view:
                self.cached.append((position, view.nbytes))
            write_all(fd, position, view)

        monkeypatch.setattr(output_file, "write_direct", wrote_direct)
        monkeypatch.setattr(output_file, "write_all", wrote)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    return Written(monkeypatch)


def shared(position: int, size_bytes: int) -> memoryview:
    """Random bytes at the same offset within a page as `position`."""
    memory = Arena()
    memory.empty((size_bytes + PAGE_BYTES,), dtype=torch.uint8)
    memory.clear()
    memory.begin_like(position)
    tensor = memory.empty((size_bytes,), dtype=torch.uint8)
    return tensor_bytes(tensor.random_(0, 256))


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("position", "in_memory", "size_bytes", "part"),
    [
        (0, 8 * PAGE_BYTES, LEAST_BYTES, (0, LEAST_BYTES)),
        (0, 0, LEAST_BYTES - 1, (0, 0)),
        (64, 64, LEAST_BYTES, (0, 0)),  # whole pages make up less
        (64, PAGE_BYTES + 64, LARGE, (PAGE_BYTES - 64, LARGE - 64)),
        (PAGE_BYTES - 1, PAGE_BYTES - 1, LARGE + 1, (1, LARGE + 1)),
        (0, 64, LARGE, (0, 0)),  # differently aligned
    ],
)
def test_whole_pages_with_the_same_alignment_in_memory_and_file_go_past_the_cache(
    position: int, in_memory: int, size_bytes: int, part: tuple[int, int]
) -> None:
    start = in_memory % PAGE_BYTES
    pages = memoryview(mmap.mmap(-1, size_bytes + PAGE_BYTES))  # which begins with a page
    assert direct_part(position, pages[start : start + size_bytes]) == part


def test_a_large_piece_goes_past_the_cache_and_its_ends_follow(
    tmp_path: Path, written: Written
) -> None:
    position, size_bytes = 128, LARGE
    view = shared(position, size_bytes)
    file = OutputFile(tmp_path / "file", position + size_bytes)
    file.write_shared(position, view, nothing)
    file.write_copied(0, memoryview(bytes(position)))
    _, digest = file.finish()
    first, last = PAGE_BYTES, size_bytes // PAGE_BYTES * PAGE_BYTES
    assert written.past == [(first, last - first)]
    # What lies side by side goes together.
    assert written.cached == [(0, first), (last, position + size_bytes - last)]
    content = (tmp_path / "file").read_bytes()
    assert content == bytes(position) + bytes(view)
    assert digest == hashlib.sha256(content).hexdigest()


def test_memory_is_shared_until_digest_and_disk_have_it(tmp_path: Path) -> None:
    released: list[int] = []
    file = OutputFile(tmp_path / "file", 2 * LARGE)
    file.write_shared(LARGE, shared(LARGE, LARGE), lambda: released.append(2))
    file.write_shared(0, shared(0, LARGE), lambda: released.append(1))
    while file.wait_for_disk():
        pass
    assert sorted(released) == [1, 2]  # on disk, in whatever order, and not digested
    file.digest(2 * LARGE)
    assert sorted(released) == [1, 1, 2, 2]
    file.finish()
    assert sorted(released) == [1, 1, 2, 2]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_pieces_in_any_order_make_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "file"
    sizes = data.draw(
        st.lists(st.sampled_from([0, 4, 72, 5000, SHARED_BYTES, LARGE, LARGE + 8]), min_size=1)
    )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    total = sum(sizes)
    content = bytearray(total)
    file = OutputFile(path, total)
    for i in data.draw(st.permutations(range(len(sizes)))):
        start, size = starts[i], sizes[i]
        view = shared(start + data.draw(st.sampled_from([0, 0, 64])), size)
        content[start : start + size] = view
        if size >= SHARED_BYTES and data.draw(st.booleans()):
            file.write_shared(start, view, nothing)
        else:
            file.write_copied(start, view)
            view[:] = bytes(size)  # which the file must not see
        file.digest(LARGE)
    _, digest = file.finish()
    assert path.read_bytes() == content
    assert digest == hashlib.sha256(content).hexdigest()


def test_small_pieces_do_not_gather_for_ever(
    tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_file, "_GATHERED_BYTES", 100)
    file = OutputFile(tmp_path / "file", 300)
    for at in range(0, 240, 60):
        file.write_copied(at, memoryview(bytes(60)))
    assert written.cached == [(0, 120), (120, 120)]
    file.write_copied(240, memoryview(bytes(60)))
    assert len(written.cached) == 2
    file.finish()
    assert written.cached[2:] == [(240, 60)]


def test_small_pieces_behind_a_hole_are_not_kept_for_the_digest(
    tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_file, "_GATHERED_BYTES", 100)
    content = os.urandom(100_060)
    file = OutputFile(tmp_path / "file", len(content))
    most = 0
    for at in range(60, len(content), 40):
        file.write_copied(at, memoryview(content[at : at + 40]))
        file.digest(LARGE)
        most = max(most, sum(len(memory) for memory, _ in file._digest._kept.values()))
    assert most < 100 + 40
    file.write_copied(0, memoryview(content[:60]))
    assert file.finish()[1] == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "file").read_bytes() == content


def let_direct_writes(monkeypatch: pytest.MonkeyPatch, reply: int | BaseException) -> None:
    """Make direct writes write at most `reply` bytes, or raise it."""

    pwrite = os.pwrite

    def answered(fd: int, view: memoryview, position: int) -> int:
        if isinstance(reply, BaseException):
            raise reply
        return pwrite(fd, view[:reply], position)

    def write(fd: int, position: int, view: memoryview) -> int:
        with monkeypatch.context() as context:
            context.setattr(os, "pwrite", answered)
            return write_direct(fd, position, view)

    monkeypatch.setattr(output_file, "write_direct", write)


@pytest.mark.parametrize(
    "reply",
    [OSError(errno.EINVAL, os.strerror(errno.EINVAL)), 0, PAGE_BYTES],
    ids=["wants more than pages", "nothing", "a part"],
)
def test_what_a_disk_leaves_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: int | OSError
) -> None:
    let_direct_writes(monkeypatch, reply)
    view = shared(0, LARGE)
    file = OutputFile(tmp_path / "file", LARGE)
    file.write_shared(0, view, nothing)
    assert file.finish()[1] == hashlib.sha256(view).hexdigest()
    assert (tmp_path / "file").read_bytes() == view


@pytest.mark.parametrize("noticed", ["by the next piece", "by who waits", "at the end"])
def test_a_disk_that_fails_past_the_cache_is_reported_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: str
) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    let_direct_writes(monkeypatch, OSError(errno.EIO, os.strerror(errno.EIO)))
    released: list[int] = []
    file = OutputFile(tmp_path / "file", 2 * LARGE)
    file.write_shared(0, shared(0, LARGE), lambda: released.append(1))
    file.digest(LARGE)
    while file._under_way:
        pass
    next_step: dict[str, Callable[[], object]] = {
        "by the next piece": lambda: file.write_shared(LARGE, shared(LARGE, LARGE), nothing),
        "by who waits": lambda: file.wait_for_disk(),
        "at the end": lambda: file.finish(),
    }
    with pytest.raises(MoequantError, match=r"cannot be written: Input.*system's log"):
        next_step[noticed]()
    file.abort()
    assert released == [1, 1]
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_any_other_failure_past_the_cache_is_reported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_direct_writes(monkeypatch, MemoryError("no memory for it"))
    file = OutputFile(tmp_path / "file", LARGE)
    file.write_shared(0, shared(0, LARGE), nothing)
    with pytest.raises(MemoryError, match="no memory for it"):
        file.finish()
    file.abort()


def test_a_file_system_without_such_writes_has_no_second_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    asked = []

    def refuse(*_: Any) -> int:
        asked.append(path)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(direct, "_file_system", lambda _: EXT4)
    assert open_direct(path, fd) is None
    assert asked == [path]
    monkeypatch.setattr(direct, "_file_system", lambda _: NFS)
    assert open_direct(path, fd) is None
    monkeypatch.setattr(direct, "_file_system", lambda _: EXT4)
    monkeypatch.delattr(os, "O_DIRECT")
    assert open_direct(path, fd) is None
    assert asked == [path]
    os.close(fd)


def test_many_threads_begin_writes_and_wait(tmp_path: Path, written: Written) -> None:
    count = 40
    file = OutputFile(tmp_path / "file", count * LEAST_BYTES)

    def work(number: int) -> None:
        at = number * LEAST_BYTES
        view = shared(at, LEAST_BYTES)
        view[:] = bytes([number + 1]) * LEAST_BYTES
        file.write_shared(at, view, nothing)
        if number % 3 == 0:
            file.wait_for_disk()

    assert not file.wait_for_disk()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(count)))
    while file.wait_for_disk():
        pass
    content = b"".join(bytes([i + 1]) * LEAST_BYTES for i in range(count))
    assert len(written.past) == count
    assert file.finish() == (len(content), hashlib.sha256(content).hexdigest())
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_has_work_pending_until_its_memory_is_released(tmp_path: Path) -> None:
    go_on = threading.Event()
    released: list[int] = []

    def release() -> None:
        if threading.current_thread() is not threading.main_thread():
            go_on.wait()
        released.append(1)

    file = OutputFile(tmp_path / "file", LARGE)
    file.write_shared(0, shared(0, LARGE), release)
    file.digest(LARGE)
    assert file.has_pending_work
    assert released == [1]
    go_on.set()
    assert file.wait_for_disk()
    assert released == [1, 1]
    while file.wait_for_disk():
        pass
    assert not file.has_pending_work
    file.abort()


def test_giving_up_waits_for_every_write(tmp_path: Path) -> None:
    released: list[int] = []
    file = OutputFile(tmp_path / "file", 9 * LARGE)
    for number in range(9):
        at = number * LARGE
        file.write_shared(at, shared(at, LARGE), lambda: released.append(1))
    file.abort()
    assert len(released) == 9
    assert list(tmp_path.iterdir()) == []
