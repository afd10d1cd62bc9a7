"""What is left of a shard, handed out to workers a batch at a time.

Small units are converted one after the other and written and digested together: what a worker does
between two kernels costs more than its own time, for it waits for Python's lock and finds nothing
of its own in the cache.
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
"""Results of several units that are written together take at most so much: beside what is read for
one of them it stays in a processor's cache."""
_TURNS = 4
"""Times that every worker shall get something of what is left, so that all end together."""


class Batches:
    """Items that several workers take, each once and in order.

    Args:
        items: in the order of the file.
        workers: how many take them.
    """

    def __init__(self, items: Sequence[Item], workers: int) -> None:
        self._left = deque(enumerate(items))
        self._turns = _TURNS * workers
        self._taking = threading.Lock()

    def take(self) -> list[tuple[int, Item]]:
        """The next item with its number, and units behind it that are written with it.

        Empty once nothing is left.
        """
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
        """Leave nothing to take."""
        with self._taking:
            self._left.clear()

    def __bool__(self) -> bool:
        return bool(self._left)


def _bytes_of(item: Item) -> int:
    """What an item takes of a batch; all of it, and more, if it must come alone.

    Results that are joined lie in memory that nobody counts, recoded ones where they were read,
    which the next unit is read over.
    """
    if (
        isinstance(item, Unit)
        and item.stack is None
        and all(weight.stored_format is None for weight in item.weights)
    ):
        return item.result_bytes
    return BATCH_BYTES + 1
