"""Safetensors files written piece by piece, in any order and from any thread.

The header is known before any data exists, so every tensor has its place in the file from the
start: nothing is gathered in memory, and slices of one tensor may come from several workers.
"""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moequant.checkpoint.buffers import joined_bytes
from moequant.checkpoint.digest import GrowingDigest
from moequant.checkpoint.headers import DTYPE_BITS, bit_count, dtype_name, encode_header
from moequant.errors import MoequantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from typing_extensions import Buffer

_NO_SPACE = "free space there or choose another output, then run again"
_NO_RIGHT = "choose an output you may write to"
_ADVICE = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EFBIG: "files this large are refused there; choose a smaller --max-shard-size",
    errno.EIO: "the disk or the way to it failed; see the system's log before you run again",
}
# What file systems answer that cannot reserve space (ZFS says EINVAL).
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


_KEPT_BYTES = 1 << 16
"""Less than this is read back for the digest: it may come much later, and memory would wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlot:
    """The place of one tensor in a file that is being written.

    Attributes:
        name: full name.
        dtype: safetensors name, a key of DTYPE_BITS.
        shape: extents, in elements.
        offset: of the first byte, relative to the data section.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """Bytes the tensor takes in the file."""
        return bit_count(self.dtype, self.shape) // 8


def lay_out(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
) -> tuple[bytes, dict[str, TensorSlot]]:
    """Give each tensor its place in a file.

    The given order holds for tensors of a multiple of 8 bytes, nearly all of a checkpoint's; then
    come the others, larger elements first. With data that starts at a multiple of 8, every tensor
    is then aligned to its element size without holes. A file that is written in the given order
    grows from its start, so that its digest can keep up. It will have `len(header)` plus the slots'
    bytes.

    Args:
        tensors: name, safetensors dtype and shape of each; no name twice.

    Returns:
        The header, with the 8 bytes in front of it, and the slots by name in file order.

    Raises:
        UnsupportedError: too many tensors for one header.
    """
    slots: dict[str, TensorSlot] = {}
    offset = 0
    for name, dtype, shape in sorted(tensors, key=_place):
        assert name not in slots, name
        assert bit_count(dtype, shape) % 8 == 0, (name, dtype, shape)
        slots[name] = TensorSlot(name=name, dtype=dtype, shape=shape, offset=offset)
        offset += slots[name].size_bytes
    return encode_header(slots.values()), slots


def _place(tensor: tuple[str, str, tuple[int, ...]]) -> int:
    """What sorts a tensor: 0 for those that leave every element behind them aligned."""
    _, dtype, shape = tensor
    return (
        0 if bit_count(dtype, shape) % 64 == 0 else 1 + max(DTYPE_BITS.values()) - DTYPE_BITS[dtype]
    )


class _Piece(NamedTuple):
    """A whole tensor, contiguous in memory, and where in the file it goes."""

    name: str
    position: int
    tensor: Tensor

    def order(self) -> tuple[int, int]:
        """What sorts pieces; one without bytes stands before that which begins where it does."""
        return self.position, self.tensor.nbytes

    def ends_at(self, other: _Piece) -> bool:
        """Whether `other` begins where this ends, in memory and in the file."""
        size_bytes = self.tensor.nbytes
        return (
            self.position + size_bytes == other.position
            and self.tensor.data_ptr() + size_bytes == other.tensor.data_ptr()
        )


def _runs(pieces: Iterable[_Piece]) -> list[list[_Piece]]:
    """Sorted pieces, those together that follow one another in memory too."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        if runs and runs[-1][-1].ends_at(piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _countdown(count: int, last: Callable[[], None]) -> Callable[[], None]:
    """What calls `last` when it has been called `count` times and is called once more."""
    # A list and not a number: to pop is one step for all threads.
    left = [last, *(_nothing,) * count]
    return lambda: left.pop()()


def _nothing() -> None:
    pass


class ShardWriter:
    """One safetensors file in the making.

    Several threads may write at once; `finish` and `abort` come when none of them does, for a
    descriptor that is closed may be another file's the next moment.

    Space is reserved at the start, where the file system can, so that a full disk shows before the
    work is done. An existing file at `path` is overwritten. Every OSError becomes a MoequantError
    that says what to do.

    Args:
        path: where to write; the name of an unfinished file, for the caller to rename.
        header: as `lay_out` returns it.
        slots: as `lay_out` returns them.
    """

    def __init__(self, path: Path, header: bytes, slots: Mapping[str, TensorSlot]) -> None:
        self.path = path
        self.size_bytes = len(header) + sum(slot.size_bytes for slot in slots.values())
        self._slots = slots
        self._data_start = len(header)
        # Ranges and not a sum: a slice written twice must not hide one that never came.
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in slots}
        with explained(path, "created"):
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._digest = GrowingDigest(self._fd)
        try:
            with explained(path, f"given its {self.size_bytes} bytes"):
                _reserve(self._fd, self.size_bytes)
            self._write_at(0, memoryview(header))
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor; its dtype and shape must be the slot's."""
        self.write_all({name: tensor})

    def write_all(
        self, tensors: Mapping[str, Tensor], release: Callable[[], None] | None = None
    ) -> None:
        """Write whole tensors, those that follow one another in memory too in one call.

        Args:
            tensors: by name.
            release: called once the digest needs their memory no more, and until then it must hold
                them; without it, what they hold is read back.
        """
        pieces = sorted((self._piece(*item) for item in tensors.items()), key=_Piece.order)
        runs = [(run[0].position, joined_bytes([p.tensor for p in run])) for run in _runs(pieces)]
        keep = {at for at, view in runs if view.nbytes >= _KEPT_BYTES} if release else set()
        once = _countdown(len(keep), release or _nothing)
        for position, view in runs:
            self._write_at(position, view, once if position in keep else None)
        for piece in pieces:
            if piece.tensor.nbytes:
                self._written[piece.name].append((0, piece.tensor.nbytes))
        once()

    def _piece(self, name: str, tensor: Tensor) -> _Piece:
        slot = self._slots[name]
        found, wanted = (dtype_name(tensor.dtype), tuple(tensor.shape)), (slot.dtype, slot.shape)
        _ensure(found == wanted, f"{name}: {found} to write, but the plan says {wanted}")
        return _Piece(name, self._data_start + slot.offset, tensor.detach().cpu().contiguous())

    def write_bytes(self, name: str, offset_bytes: int, buffer: Buffer) -> None:
        """Write `buffer` at `offset_bytes` of the tensor; each byte must be written once."""
        slot = self._slots[name]
        view = memoryview(buffer).cast("B")
        stop = offset_bytes + view.nbytes
        _ensure(
            offset_bytes >= 0 and stop <= slot.size_bytes,
            f"{name}: bytes {offset_bytes} to {stop} of {slot.size_bytes}",
        )
        self._write_at(self._data_start + slot.offset + offset_bytes, view)
        if view.nbytes:
            self._written[name].append((offset_bytes, stop))

    def digest(self, at_most_bytes: int) -> bool:
        """Digest what the file has got since, from its start on, unless another thread is at it.

        Returns:
            Whether it was as much as that.
        """
        with explained(self.path, "read"):
            return self._digest.catch_up(at_most_bytes)

    def finish(self) -> tuple[int, str]:
        """Digest the rest of the file, bring it to disk and close it.

        Returns:
            Its size in bytes and its SHA-256 in hex.
        """
        for name, slot in self._slots.items():
            position = 0
            for start, stop in sorted(self._written[name]):
                _ensure(start == position, f"{name}: byte {min(start, position)} written not once")
                position = stop
            _ensure(position == slot.size_bytes, f"{name}: {position} of {slot.size_bytes} bytes")
        self.digest(self.size_bytes)
        with explained(self.path, "finished"):
            os.fsync(self._descriptor())
            self._close()
        return self.size_bytes, self._digest.of_first(self.size_bytes)

    def abort(self) -> None:
        """Close the file, if it is open, and remove it, if it is there."""
        with explained(self.path, "removed"):
            try:
                self._close()
            finally:
                self.path.unlink(missing_ok=True)

    def _descriptor(self) -> int:
        if self._fd is None:
            raise AssertionError(f"{self.path}: already closed")
        return self._fd

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _write_at(
        self, position: int, view: memoryview, release: Callable[[], None] | None = None
    ) -> None:
        with explained(self.path, "written"):
            _write_all(self._descriptor(), position, view)
        if release is None:
            self._digest.wrote(position, position + view.nbytes)
        else:
            self._digest.wrote_from(position, view, release)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a crash at any time leaves the old file or the new one.

    Raises:
        MoequantError: it cannot be written; says what to do.
    """
    partial = path.with_name(f".{path.name}.partial")
    with explained(path, "written"):
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                _write_all(fd, 0, memoryview(data))
                os.fsync(fd)
            finally:
                os.close(fd)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Bring names just created, renamed or removed in the directory `path` to disk.

    Raises:
        MoequantError: it cannot be done; says what to do.
    """
    with explained(path, "brought to disk"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems have no such call for directories and keep names themselves.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)


def sha256_of(path: Path) -> str:
    """SHA-256, in hex, of the file at `path`; read in pieces.

    Raises:
        MoequantError: it cannot be read; says what to do.
    """
    with explained(path, "read"), path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reserve(fd: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):  # macOS has none
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
    os.ftruncate(fd, size_bytes)


def _write_all(fd: int, position: int, view: memoryview) -> None:
    # Linux moves at most 2 GiB a call, and any call may move less than asked.
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], position + done)


def _ensure(condition: bool, fault: str) -> None:
    """Assert that also holds under `python -O`: what it guards is the user's weights."""
    if not condition:
        raise AssertionError(fault)


@contextmanager
def explained(path: Path, participle: str) -> Iterator[None]:
    """Turn an OSError into a MoequantError that says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "mend the cause and run again")
        raise MoequantError(
            f"{path}: cannot be {participle}: {error.strerror}; {advice}"
        ) from error
