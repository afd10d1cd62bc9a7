"""Read many small tensors: those that lie near each other together, and several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo

_REMOTE_BYTES = 4096
"""What is read of a scale on the hub: a converter that writes NaN writes nothing else."""
_GAP_BYTES = _REMOTE_BYTES
"""What is read between two tensors rather than ask twice; a request takes longer."""
_CALL_BYTES = 1 << 20
"""Tensors are read together up to this size."""
_AT_ONCE = 16
_READS_A_TASK = 256

T = TypeVar("T")


def look_at(
    checkpoint: Checkpoint, tensors: Iterable[TensorInfo], look: Callable[[TensorInfo, Tensor], T]
) -> dict[str, T]:
    """What `look` says of each tensor and its values, by name.

    Of a large tensor on the hub, the values are those of its first rows.

    Raises:
        CheckpointError: a file is unreadable, or has changed.
    """
    calls: list[list[tuple[TensorInfo, slice | None]]] = []
    size, end, is_local = 0, ("", 0), checkpoint.is_local
    for info in sorted({info.name: info for info in tensors}.values(), key=_place):
        rows = None if is_local else _first_rows(info)
        part = checkpoint.locate(info.name, rows).info
        gap = part.start - end[1] if end[0] == info.file else -1
        if not 0 <= gap <= _GAP_BYTES or size + part.size_bytes > _CALL_BYTES:
            calls.append([])
            size = 0
        calls[-1].append((info, rows))
        size, end = size + part.size_bytes, (info.file, part.stop)

    def read(calls: Sequence[Sequence[tuple[TensorInfo, slice | None]]]) -> dict[str, T]:
        found = {}
        for call in calls:
            ranges = [(info.name, rows) for info, rows in call]
            values = checkpoint.read_all(ranges, gap_bytes=_GAP_BYTES)
            for (info, _), own in zip(call, values, strict=True):
                found[info.name] = look(info, own)
        return found

    # A thread takes longer to start on a task than to read a few scales of a disk.
    each = _READS_A_TASK if is_local else 1
    tasks = [calls[i : i + each] for i in range(0, len(calls), each)]
    with ThreadPoolExecutor(_AT_ONCE, "moequant-scales") as pool:
        return {name: said for found in pool.map(read, tasks) for name, said in found.items()}


def _place(info: TensorInfo) -> tuple[str, int]:
    return info.file, info.start


def _first_rows(info: TensorInfo) -> slice | None:
    """The first rows of a large tensor; None for all of another."""
    if info.size_bytes <= _REMOTE_BYTES or not info.shape:
        return None
    row_bytes = max(info.size_bytes // max(info.shape[0], 1), 1)
    rows = min(max(_REMOTE_BYTES // row_bytes, 1), info.shape[0])
    return slice(0, rows)
