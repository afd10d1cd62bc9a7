"""Copy bytes of files to a device through a pinned buffer of fixed size.

Decisions, each with the failure it prevents:

* The host holds only the buffer, no tensors: a layer of DeepSeek-V3 is 11 GB, and a model would not
  fit.
* The buffer is divided into slots, which a few threads fill while others are copied. One thread
  reads from a disk, or the page cache, at a fraction of PCIe's bandwidth.
* Adjacent ranges of a file are read together, in pieces of megabytes. Otherwise a few bytes of
  scales would take as long as a megabyte of codes, and threads would wait for the GIL.
* The thread that read a slot also queues its copies. One thread that did so for all of them would
  hold the others up.
* Copies are queued on the stream that is current where `stream` is used, and only reusing a slot
  waits for its copy. A separate stream would have to be synchronized by the users of the tensors.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from moequant.storage.buffers import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from concurrent.futures import Future

    from torch import Tensor

    from moequant.storage.reader import FixedFile

SLOT_BYTES = 16 << 20
SLOTS = 24
THREADS = 16
"""Measured: docs/layouts.md, "Loading". The other slots are copied or wait."""
_GAP_BYTES = 1 << 16
"""Gaps up to this size between two tensors are read instead of skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Bytes of a file that shall fill a tensor.

    Attributes:
        file: where they are.
        start: offset of the first of them.
        target: contiguous, on the device or on the host.
        what: passed through to the caller.
    """

    file: FixedFile
    start: int
    target: Tensor
    what: object = None


class Staging:
    """The way from files to one device. A CPU needs none: its tensors are filled where they are.

    Args:
        device: where tensors are filled.
        slot_bytes: size of a slot.
        slots: how many; the buffer takes slots * slot_bytes, and nothing on a CPU.
    """

    def __init__(
        self, device: torch.device, *, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS
    ) -> None:
        self.device = device
        self._slot_bytes = slot_bytes
        self._slots: list[_Slot] = []
        if device.type != "cpu":
            pinned = device.type == "cuda"
            buffer = torch.empty(
                (slots, slot_bytes), dtype=torch.uint8, device="cpu", pin_memory=pinned
            )
            self._slots = [_Slot(row, device) for row in buffer]

    def stream(self, reads: Iterable[Read]) -> Generator[Read, None, None]:
        """Fill every target; yields each read, in order, once its bytes are queued for the device.

        Reads are asked for a few slots ahead. Those that follow each other in a file should
        come so. One stream at a time: they would share the slots.

        Raises:
            CheckpointError: a file cannot be read, or is no longer the same.
        """
        most = len(self._slots) or THREADS
        chunks = _chunks(reads, self._slot_bytes if self._slots else None)
        pending: deque[tuple[_Chunk, Future[None]]] = deque()
        with self._pool() as pool:
            try:
                for number, chunk in enumerate(chunks):
                    if len(pending) == most:
                        yield from _land(*pending.popleft())
                    if self._slots:
                        moved = pool.submit(self._slots[number % most].move, chunk)
                    else:
                        moved = pool.submit(_read_in_place, chunk)
                    pending.append((chunk, moved))
                while pending:
                    yield from _land(*pending.popleft())
            finally:
                for _, future in pending:
                    future.cancel()

    def _pool(self) -> ThreadPoolExecutor:
        """Threads that queue copies on the stream that is current in this one."""
        if self.device.type != "cuda":
            return ThreadPoolExecutor(THREADS)
        stream = torch.cuda.current_stream(self.device)
        return ThreadPoolExecutor(THREADS, initializer=torch.cuda.set_stream, initargs=(stream,))


@dataclass(kw_only=True, slots=True)
class _Chunk:
    """Bytes of a file that are read at once: at most a slot, or those of one read in place.

    Attributes:
        file: where they are.
        start: offset of the first of them.
        size_bytes: how many.
        parts: offsets in the chunk, and the uint8 that the bytes from there on fill.
        ends: the reads whose last bytes are in it.
    """

    file: FixedFile
    start: int
    size_bytes: int = 0
    parts: list[tuple[int, Tensor]] = field(default_factory=list)
    ends: list[Read] = field(default_factory=list)

    def takes(self, file: FixedFile, position: int, slot_bytes: int) -> bool:
        """Whether the bytes from `position` on may follow, at least one of them."""
        behind = position - self.start
        near = self.size_bytes <= behind <= self.size_bytes + _GAP_BYTES
        return file is self.file and near and behind < slot_bytes

    def add(self, position: int, target: Tensor, most_bytes: int) -> int:
        """Take the bytes from `position` on for `target` until the chunk is full; how many."""
        at = position - self.start
        part = target[: most_bytes - at]
        self.parts.append((at, part))
        self.size_bytes = at + part.nbytes
        return part.nbytes


def _chunks(reads: Iterable[Read], slot_bytes: int | None) -> Iterator[_Chunk]:
    """The bytes of all reads, in order, in as few chunks as neighbours allow; None: one a read."""
    chunk: _Chunk | None = None
    for read in reads:
        # A scalar has no last dimension to view as bytes.
        target, done = read.target.reshape(-1).view(torch.uint8), 0
        while True:
            position = read.start + done
            if (
                chunk is None
                or slot_bytes is None
                or not chunk.takes(read.file, position, slot_bytes)
            ):
                if chunk is not None:
                    yield chunk
                chunk = _Chunk(file=read.file, start=position)
            done += chunk.add(position, target[done:], slot_bytes or target.nbytes)
            if done == target.nbytes:
                chunk.ends.append(read)
                break
    if chunk is not None:
        yield chunk


class _Slot:
    """A part of the buffer, and when all copies out of it are done."""

    def __init__(self, buffer: Tensor, device: torch.device) -> None:
        self._buffer = buffer
        self._sent: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def move(self, chunk: _Chunk) -> None:
        """Read a chunk, once what was here before has been sent, and send it where it belongs."""
        if self._sent is not None:
            self._sent.synchronize()
        chunk.file.read_into(chunk.start, tensor_bytes(self._buffer[: chunk.size_bytes]))
        for at, part in chunk.parts:
            part.copy_(self._buffer[at : at + part.nbytes], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def _read_in_place(chunk: _Chunk) -> None:
    """Read a chunk of one read to where it belongs."""
    chunk.file.read_into(chunk.start, tensor_bytes(chunk.parts[0][1]))


def _land(chunk: _Chunk, moved: Future[None]) -> Iterator[Read]:
    """Wait for a chunk; yields the reads that end in it."""
    moved.result()
    yield from chunk.ends
