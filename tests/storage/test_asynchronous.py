"""Writes go on while the thread that began them does, and each is reported once."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from moequant.storage import asynchronous
from moequant.storage.asynchronous import WritesUnderWay

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PIECE = 8192


@pytest.fixture
def file(tmp_path: Path) -> Iterator[WritesUnderWay]:
    file = WritesUnderWay(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    yield file
    file.close()


def piece(number: int) -> memoryview:
    return memoryview(bytearray([number % 251 + 1]) * PIECE)


def content(file: WritesUnderWay) -> bytes:
    return os.pread(file.fd, 1 << 30, 0)


def test_a_write_is_reported_when_it_is_collected(file: WritesUnderWay) -> None:
    reported: list[int] = []
    assert not file.collect(wait=True)
    file.begin(PIECE, piece(1), reported.append)
    assert reported == []
    assert file.collect(wait=True)
    assert reported == [PIECE]
    assert not file.collect(wait=False)
    assert content(file) == bytes(PIECE) + bytes(piece(1))


@pytest.mark.parametrize(("collected", "result"), [("meanwhile", -errno.EAGAIN), ("later", PIECE)])
def test_a_full_queue_that_another_thread_empties_is_not_waited_for_for_ever(
    collected: str, result: int, file: WritesUnderWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[int] = []
    calls = file._calls
    refused = threading.Event()

    def full_once(*arguments: Any) -> int:
        if refused.is_set():
            return calls.submit(*arguments)
        refused.set()
        if collected == "meanwhile":
            file.collect(wait=True)
        raise BlockingIOError(errno.EAGAIN, "full")

    file.begin(0, piece(0), reported.append)
    monkeypatch.setattr(file, "_calls", calls._replace(submit=full_once))
    file.begin(PIECE, piece(1), reported.append)
    file.collect(wait=True)
    assert reported == [PIECE, result]


def test_more_writes_than_the_system_takes_at_once_wait_for_room(
    file: WritesUnderWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynchronous, "_free", [])
    monkeypatch.setattr(asynchronous, "_AT_ONCE", 4)
    other = WritesUnderWay(os.dup(file.fd))
    reported: list[int] = []
    count = 1000  # the system rounds up
    for i in range(count):
        other.begin(i * PIECE, piece(i), reported.append)
    other.close()
    assert reported == [PIECE] * count
    assert content(file) == b"".join(piece(i) for i in range(count))


def test_many_threads_begin_and_collect(file: WritesUnderWay) -> None:
    reported: list[int] = []

    def work(number: int) -> None:
        file.begin(number * PIECE, piece(number), reported.append)
        file.collect(wait=number % 3 == 0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(400)))
    while file.collect(wait=True):
        pass
    assert reported == [PIECE] * 400
    assert content(file) == b"".join(piece(i) for i in range(400))


def test_what_the_system_refuses_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = WritesUnderWay(os.open(tmp_path / "file", os.O_RDONLY))
    reported: list[int] = []
    file.begin(0, piece(1), reported.append)
    assert reported == [-errno.EBADF]
    assert not file.collect(wait=True)
    file.close()


def test_a_context_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "_free", [])
    contexts = []
    for _ in range(3):
        file = WritesUnderWay(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
        contexts.append(file._context.value)
        file.close()
    assert len({*contexts}) == 1


def test_a_machine_without_such_calls_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "_NUMBERS", {})
    with pytest.raises(OSError, match="not implemented"):
        asynchronous._calls.__wrapped__()
