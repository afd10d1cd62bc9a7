"""Write safetensors files in pieces, in any order and from any thread.

The header is known before any data exists, so every tensor has a fixed position: no tensor waits
for another, and slices of a tensor may come from several workers.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NoReturn

from moequant.storage.buffers import joined_bytes
from moequant.storage.headers import (
    DTYPE_BITS,
    TensorInfo,
    bit_count,
    dtype_name,
    encode_header,
)
from moequant.storage.output_file import SHARED_BYTES, OutputFile, nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from typing_extensions import Buffer


def lay_out(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Assign each tensor its position in a file.

    Tensors whose size is a multiple of 64 bytes, nearly all of a checkpoint, come first, in the
    given order. Then come multiples of 8 bytes, then the others, larger elements first. Since the
    data begins at a page boundary, every tensor is aligned to its element size without gaps, and
    the first group to a cache line. A file written in the given order grows from its start, so that
    its digest can keep up.

    Args:
        tensors: name, safetensors dtype and shape of each; names are unique.
        metadata: as for `encode_header`.

    Returns:
        The header as in the file, and the entries that `read_header` would find in it.

    Raises:
        UnsupportedError: too many tensors for one header.
    """
    placed = []
    start = 0
    for name, dtype, shape in sorted(tensors, key=_place):
        size_bytes, rest = divmod(bit_count(dtype, shape), 8)
        assert rest == 0, (name, dtype, shape)
        placed.append((name, dtype, shape, start, start + size_bytes))
        start += size_bytes
    header = encode_header(placed, metadata)
    before = len(header)
    slots = {
        name: TensorInfo(name, dtype, shape, "", before + start, before + stop)
        for name, dtype, shape, start, stop in placed
    }
    assert len(slots) == len(placed), "two tensors of one name"
    return header, slots


def _place(tensor: tuple[str, str, tuple[int, ...]]) -> int:
    """Sort key by which every tensor leaves its successors aligned."""
    _, dtype, shape = tensor
    size_bits = bit_count(dtype, shape)
    if size_bits % 64 == 0:
        return 0 if size_bits % 512 == 0 else 1
    return 2 + max(DTYPE_BITS.values()) - DTYPE_BITS[dtype]


def _reference_count(count: int, last: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `last` when it is called for the (count + 1)-th time."""
    # A list instead of a number, because pop is atomic.
    left = [last, *(nothing,) * count]
    return lambda: left.pop()()


class ShardWriter(OutputFile):
    """A safetensors file that is being written, with `header` and `slots` from `lay_out`.

    `path` is a temporary name; the caller renames the file when it is finished.
    """

    def __init__(self, path: Path, header: bytes, slots: Mapping[str, TensorInfo]) -> None:
        super().__init__(path, len(header) + sum(slot.size_bytes for slot in slots.values()))
        self._slots = slots
        # Ranges instead of a sum, so that a slice written twice cannot hide a missing one.
        self._written: list[tuple[int, int]] = []
        try:
            self._write_runs([(0, memoryview(header))], None)
        except BaseException:
            self.abort()
            raise

    def position(self, name: str, offset_bytes: int = 0) -> int:
        """The file position of a byte of a tensor."""
        return self._slots[name].start + offset_bytes

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor, whose dtype and shape must be those of its slot."""
        self.write_all({name: tensor})

    def write_all(
        self, tensors: Mapping[str, Tensor], release: Callable[[], None] | None = None
    ) -> None:
        """Write whole tensors, with one call for those that are adjacent in memory.

        `release` is called when digest and disk no longer need the tensors' memory, which must not
        change until then. If it is None, the memory is not needed after the call.
        """
        pieces = [(self.position(n), t.nbytes, self._checked(n, t)) for n, t in tensors.items()]
        runs: list[tuple[int, list[Tensor]]] = []
        end = None
        # An empty tensor comes before another at the same position.
        for position, size_bytes, tensor in sorted(pieces, key=itemgetter(0, 1)):
            address = tensor.data_ptr()
            if (position, address) != end:
                runs.append((position, []))
            runs[-1][1].append(tensor)
            end = position + size_bytes, address + size_bytes
        self._write_runs([(start, joined_bytes(run)) for start, run in runs], release)

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, contiguous in CPU memory, if it is what its slot is for."""
        slot = self._slots[name]
        found, expected = (dtype_name(tensor.dtype), tuple(tensor.shape)), (slot.dtype, slot.shape)
        # Not `assert`, which `python -O` removes: this protects the user's weights.
        if found != expected:
            raise AssertionError(f"{name}: {found}, but the plan says {expected}")
        return tensor.cpu().contiguous()

    def write_bytes(
        self,
        name: str,
        offset_bytes: int,
        buffer: Buffer,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Write `buffer` at `offset_bytes` of the tensor; each byte must be written exactly once.

        `release` as in `write_all`.
        """
        slot = self._slots[name]
        view = memoryview(buffer).cast("B")
        stop = offset_bytes + view.nbytes
        if offset_bytes < 0 or stop > slot.size_bytes:
            raise AssertionError(f"{name}: bytes {offset_bytes} to {stop} of {slot.size_bytes}")
        self._write_runs([(self.position(name, offset_bytes), view)], release)

    def _write_runs(
        self, runs: Sequence[tuple[int, memoryview]], release: Callable[[], None] | None
    ) -> None:
        large = {at for at, view in runs if view.nbytes >= SHARED_BYTES} if release else set()
        # Each run is needed for the digest and for the disk.
        once = _reference_count(2 * len(large), release or nothing)
        for position, view in runs:
            if position in large:
                self.write_shared(position, view, once)
            else:
                self.write_copied(position, view)
            if view.nbytes:
                self._written.append((position, position + view.nbytes))
        once()

    def finish(self) -> tuple[int, str]:
        """As `OutputFile.finish`; refuses a file in which a byte was not written exactly once."""
        position = 0
        for start, stop in sorted([*self._written, (self.size_bytes, self.size_bytes)]):
            if start != position:
                self._refuse(min(start, position))
            position = stop
        return super().finish()

    def _refuse(self, position: int) -> NoReturn:
        """Raise for the tensor of a byte that was not written exactly once."""
        for name, slot in self._slots.items():
            offset = position - slot.start
            if slot.size_bytes and offset < slot.size_bytes:
                raise AssertionError(
                    f"{name}: byte {offset} of {slot.size_bytes} was not written exactly once"
                )
        raise AssertionError(f"{self.path}: byte {position} does not belong to a tensor")
