"""A queue of a shard's items, from which workers take batches.

Small units are converted in sequence, and written and digested together, because switching between
kernels and other work is expensive: a worker waits for the GIL and loses its cache. One by one,
experts of 1024 x 512 take 5 to 15 % more CPU time; those of 2048 x 768 take the same.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from moequant.conversion.units import Unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.conversion.units import Item

BATCH_BYTES = 3 << 20
"""Maximum size of results that are written together; with the input of one unit they fit in a
processor's cache."""
_TURNS = 4
"""Batches per worker among the remaining items, so that all workers end at the same time."""


class Batches:
    """A thread-safe queue of `items`, which are in file order, for `workers` threads.

    `order` has the numbers of the items in another order of work; empty for theirs.
    """

    def __init__(self, items: Sequence[Item], workers: int, order: Sequence[int] = ()) -> None:
        self._left = deque((number, items[number]) for number in order or range(len(items)))
        self._turns = _TURNS * workers
        self._taking = threading.Lock()

    def take(self) -> list[tuple[int, Item]]:
        """The next item with its number, and further units to write with it; empty at the end."""
        with self._taking:
            taken: list[tuple[int, Item]] = []
            most, size_bytes = (len(self._left) - 1) // self._turns, 0
            while self._left and (not taken or len(taken) < most):
                size_bytes += _bytes_of(self._left[0][1])
                if taken and size_bytes > BATCH_BYTES:
                    break
                taken.append(self._left.popleft())
            return taken

    def drop(self) -> None:
        """Remove all remaining items."""
        with self._taking:
            self._left.clear()

    def __bool__(self) -> bool:
        return bool(self._left)


def _bytes_of(item: Item) -> int:
    """Size of an item in a batch; larger than a batch if it must be alone.

    Parts of a stack are joined in memory that is not accounted for, and results of a lossless
    requantization may lie where they were read, which the next unit overwrites.
    """
    if (
        isinstance(item, Unit)
        and item.stack is None
        and all(weight.stored_format is None for weight in item.weights)
    ):
        return item.result_bytes
    return BATCH_BYTES + 1
