"""Files that threads fetch in the order of their use, while others are read.

A reader that needs a file waits until it is there. With a budget, files are removed: those that no
remaining step uses at once, and others when there is no room, the one whose next use is farthest
first. That one is fetched again, so the budget holds whatever the order of the uses; for a known
order, no other choice fetches less (L. Belady, IBM Systems Journal 5, 1966, for equal sizes).
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


class ShardStore:
    """Files that are fetched by threads, between `start` and `stop`.

    Args:
        sizes: size in bytes of every file that may be read, by name.
        steps: what will be done, in order: a name, and the files that it reads.
        fetch: fetches a file, whole and checked, and returns its path; called in the threads. Its
            exception is raised to every reader that waits.
        at_once: number of files that are fetched at the same time.
        budget_bytes: limit of the files that are kept or being fetched, at least the largest file;
            None keeps all.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        steps: Sequence[tuple[str, Iterable[str]]],
        fetch: Callable[[str], Path],
        *,
        at_once: int = 1,
        budget_bytes: int | None = None,
    ) -> None:
        assert budget_bytes is None or budget_bytes >= max(sizes.values(), default=0)
        self._sizes = sizes
        self._fetch = fetch
        self._budget_bytes = budget_bytes
        self._numbers = {name: number for number, (name, _) in enumerate(steps)}
        self._done = bytearray(len(steps))
        # Of each file, the steps that read it, of which those at the front may be done.
        self._uses: dict[str, deque[int]] = {file: deque() for file in sizes}
        for number, (_, files) in enumerate(steps):
            for file in set(files) & self._uses.keys():
                self._uses[file].append(number)
        # Files that no step reads are fetched once, too, after all others.
        self._never_used = {file for file, uses in self._uses.items() if not uses}
        self._present: dict[str, FixedFile] = {}
        self._fetching: set[str] = set()
        self._readers: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name="moequant-fetch", daemon=True)
            for _ in range(at_once)
        ]

    def start(self) -> None:
        """Begin to fetch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Fetch nothing more; readers that wait get an error. Fetches that have begun go on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        """After `stop`, wait for the fetches that go on; then nothing changes the files."""
        for thread in self._threads:
            thread.join()

    def finished(self, step: str) -> None:
        """Note that a step is done and will not read its files again."""
        with self._changed:
            number = self._numbers.get(step)
            if number is not None:
                self._done[number] = True
            if self._budget_bytes is not None:
                for file in [file for file in self._present if self._next_use(file) == math.inf]:
                    self._remove(file)
            self._changed.notify_all()

    def wait_until_complete(self) -> None:
        """Wait until files that no step reads have been fetched, too; raises as `held`."""
        with self._changed:
            while self._never_used:
                self._raise_if_over()
                self._changed.wait()

    @contextmanager
    def held(self, file: str) -> Iterator[FixedFile]:
        """A file, which stays where it is meanwhile; waits until it is there.

        Raises:
            CheckpointError: it cannot be fetched, or the store was stopped.
        """
        with self._changed:
            self._waiting[file] += 1
            try:
                self._changed.notify_all()
                while file not in self._present:
                    self._raise_if_over()
                    self._changed.wait()
                self._readers[file] += 1
            finally:
                self._waiting[file] -= 1
            found = self._present[file]
        try:
            yield found
        finally:
            with self._changed:
                self._readers[file] -= 1
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (file := self._choose()) is not None:
                found = FixedFile.at(self._fetch(file))
                with self._changed:
                    self._fetching.discard(file)
                    self._present[file] = found
                    self._never_used.discard(file)
                    self._changed.notify_all()
                self.finished("")
        # Readers wait in other threads, and must not wait for ever.
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._stopped = True
                self._changed.notify_all()

    def _choose(self) -> str | None:
        """The next file to fetch, once there is room for it; None if the store was stopped."""
        with self._changed:
            while not self._stopped:
                absent = self._sizes.keys() - self._present.keys() - self._fetching
                needed = [(self._urgency(file), file) for file in absent]
                urgency, file = min(needed, default=(math.inf, ""))
                if urgency < math.inf and self._make_room(file, urgency):
                    self._fetching.add(file)
                    return file
                self._changed.wait()
            return None

    def _urgency(self, file: str) -> float:
        """The step that a file is needed for: -1 if a reader waits, infinity if it is not."""
        if self._waiting[file]:
            return -1
        return len(self._done) if file in self._never_used else self._next_use(file)

    def _next_use(self, file: str) -> float:
        uses = self._uses[file]
        while uses and self._done[uses[0]]:
            uses.popleft()
        return uses[0] if uses else math.inf

    def _make_room(self, file: str, urgency: float) -> bool:
        """Remove files that are needed later than this one until it fits; whether it does."""
        if self._budget_bytes is None:
            return True
        while self._size_with(file) > self._budget_bytes:
            unread = [f for f in self._present if not self._readers[f] and not self._waiting[f]]
            latest, other = max(((self._next_use(f), f) for f in unread), default=(-math.inf, ""))
            if latest <= urgency:
                return False
            self._remove(other)
        return True

    def _size_with(self, file: str) -> int:
        """Size of a file and all that are there or being fetched."""
        return sum(self._sizes[f] for f in (file, *self._fetching, *self._present))

    def _remove(self, file: str) -> None:
        if not self._readers[file] and not self._waiting[file]:
            self._present.pop(file).path.unlink(missing_ok=True)

    def _raise_if_over(self) -> None:
        if isinstance(self._error, CheckpointError):
            raise type(self._error)(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise CheckpointError("stopped while it was fetched; run the command again")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedFile(FixedFile):
    """A file of a store: reads wait until it is there; `mtime_ns` is 0.

    Attributes:
        store: the store.
        name: its name there.
    """

    store: ShardStore = field(repr=False, compare=False)
    name: str

    @property
    def is_local(self) -> bool:
        """Whether its bytes are on a disk of this machine: not always."""
        return False

    def stop_waiting(self) -> None:
        """End reads that wait for any file of the store."""
        self.store.stop()

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """As FixedFile.read_into, once the file is there; raises as `ShardStore.held`, too."""
        with self.store.held(self.name) as file:
            file.read_into(start, *buffers)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> bytearray:
        """As FixedFile.read_ranges, once the file is there; raises as `ShardStore.held`, too."""
        with self.store.held(self.name) as file:
            return file.read_ranges(ranges)

    def chunks(self, start: int, stop: int, chunk_bytes: int) -> Iterator[memoryview]:
        """As FixedFile.chunks, once the file is there; raises as `ShardStore.held`, too."""
        with self.store.held(self.name) as file:
            yield from file.chunks(start, stop, chunk_bytes)
