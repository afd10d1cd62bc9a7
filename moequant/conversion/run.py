"""Write the shards of a plan: read, quantize, write, digest, a bounded number of units at a time.

Each worker takes a unit, or a batch of small ones, through all steps in its own memory, which it
reuses, and then digests what the file has up to the first gap, unless another worker does. So the
digest needs no thread, reads what is still in memory, and is nearly done when the last unit is.
SHA-256 is sequential, so many workers outrun it: they go on with the next shard while others are
digested to their end and synced to disk.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from moequant.conversion.batches import Batches
from moequant.conversion.finished_shard import FinishedShard, UsedQuantizer
from moequant.conversion.memory import COPY_CHUNK_BYTES
from moequant.conversion.merging import merged_errors
from moequant.conversion.quantize_unit import convert_unit
from moequant.conversion.requantization_error import error_of_tiles
from moequant.conversion.units import Copy, Unit
from moequant.quantizers.worker_pool import worker_pool
from moequant.storage.buffers import Arena, tensor_bytes
from moequant.storage.writer import ShardWriter
from moequant.weights.finite import find_not_finite
from moequant.weights.source_weights import check_bias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from moequant.conversion.gptq_errors import GptqError
    from moequant.conversion.journal import Journal
    from moequant.conversion.plan import Plan
    from moequant.conversion.quantize_unit import Converted
    from moequant.conversion.requantization_error import RequantizationError
    from moequant.conversion.shards import PlannedShard
    from moequant.conversion.units import Item
    from moequant.progress import Progress
    from moequant.quantizers import Choice
    from moequant.storage.checkpoint import Checkpoint

_WORKERS_A_FINISHER = 4
"""To make a shard takes a core 1.5 to 2.6 times as long as to digest it."""
_PAUSE_SECONDS = 0.002


def write_shards(
    source: Checkpoint,
    plan: Plan,
    shards: Sequence[PlannedShard],
    journal: Journal,
    *,
    choice: Choice,
    workers: int,
    progress: Progress,
    device: str = "cpu",
    on_done: Callable[[str], object] | None = None,
) -> Iterator[FinishedShard]:
    """Write `shards` one after the other, each with `workers` threads; yield each once recorded.

    Every tensor has its place in the file, so the bytes do not depend on the number of workers.
    Filled shards are finished in other threads, one per four workers. Each unfinished shard takes
    two descriptors, 256 KiB and what `OutputFile` gathers. GPTQ computes on `device`. `on_done` is
    called with the name of each item that is done, from the thread that did it.
    """
    finishers = max(1, workers // _WORKERS_A_FINISHER)
    results = _ResultBuffers(
        choice.quantizer.allocate, plan.memory.batch_bytes, plan.memory.buffer_bytes(workers)
    )
    with (
        _without_leftovers(journal, shards),
        ThreadPoolExecutor(finishers, "moequant-finish") as finisher,
        worker_pool(workers) as pool,
    ):
        run = _Run(
            source, plan, journal, choice, progress, results, device, on_done,
            one_digest=finishers == 1,
        )  # fmt: skip
        finishing: deque[Future[FinishedShard]] = deque()
        for shard in shards:
            writer, errors = run.fill(shard, pool, workers, finishing)
            before = finishing[-1] if finishing else None
            finishing.append(finisher.submit(run.finish, shard, writer, errors, before))
            if len(finishing) > finishers:
                yield finishing.popleft().result()
        while finishing:
            yield finishing.popleft().result()


@contextmanager
def _without_leftovers(journal: Journal, shards: Sequence[PlannedShard]) -> Iterator[None]:
    """Remove unfinished files of `shards` if an interrupt comes while no writer owns them."""
    try:
        yield
    except BaseException:
        for shard in shards:
            with suppress(OSError):
                journal.partial(shard.file).unlink(missing_ok=True)
        raise


class _Found(NamedTuple):
    """What is found in items: errors by kind of weight, and copied tensors with NaN or Inf."""

    requantization: Sequence[RequantizationError] = ()
    gptq: Sequence[GptqError] = ()
    not_finite: Sequence[str] = ()


class _Filling(NamedTuple):
    """A shard whose data is being written, while shards before it are `finishing`."""

    writer: ShardWriter
    left: Batches
    errors: dict[int, _Found]
    """By number of the item."""
    finishing: Sequence[Future[FinishedShard]]


class _Run(threading.local):
    """What the shards of one conversion share; each thread has its own memory."""

    def __init__(
        self,
        source: Checkpoint,
        plan: Plan,
        journal: Journal,
        choice: Choice,
        progress: Progress,
        results: _ResultBuffers,
        device: str,
        on_done: Callable[[str], object] | None,
        *,
        one_digest: bool,
    ) -> None:
        self._source = source
        self._plan = plan
        self._journal = journal
        self._quantizer = choice.quantizer
        self._used = UsedQuantizer(name=choice.quantizer.name, reason=choice.reason)
        self._progress = progress
        self._results = results
        self._device = device
        self._on_done = on_done
        self._one_digest = one_digest

    @cached_property
    def _arena(self) -> Arena:
        """A worker's memory for what it reads; created when it is first needed."""
        return Arena(self._quantizer.allocate, self._plan.memory.read_bytes)

    def fill(
        self,
        shard: PlannedShard,
        pool: ThreadPoolExecutor,
        workers: int,
        finishing: Sequence[Future[FinishedShard]],
    ) -> tuple[ShardWriter, _Found]:
        """Write the data of a shard, while shards before it are `finishing`.

        Errors are added in the order of the plan, so that no sum depends on the workers.
        """
        partial_file = self._journal.partial(shard.file)
        writer = ShardWriter(partial_file, shard.header, shard.pieces)
        filling = _Filling(writer, Batches(shard.items, workers, shard.order), {}, finishing)
        work: list[Future[None]] = []
        try:
            for _ in range(workers):
                # One by one: what was submitted is waited for also if the next is not.
                work.append(pool.submit(self._work, filling))
            done, _ = wait(work, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            filling.left.drop()
            self._source.stop_waiting()
            wait(work)
            writer.abort()
            raise
        ordered = [filling.errors[number] for number in sorted(filling.errors)]
        return writer, _Found(
            requantization=merged_errors(e for errors in ordered for e in errors.requantization),
            gptq=merged_errors(e for errors in ordered for e in errors.gptq),
            not_finite=[fault for errors in ordered for fault in errors.not_finite],
        )

    def finish(
        self,
        shard: PlannedShard,
        writer: ShardWriter,
        errors: _Found,
        before: Future[FinishedShard] | None,
    ) -> FinishedShard:
        """Sync a filled shard to disk and, after `before`, record it."""
        try:
            size, sha256 = writer.finish()
        except BaseException:
            writer.abort()
            raise
        computed = any(not isinstance(item, Copy) for item in shard.items)
        finished = FinishedShard(
            file=shard.file,
            bytes=size,
            sha256=sha256,
            requantization_errors=tuple(errors.requantization),
            gptq_errors=tuple(errors.gptq),
            not_finite=tuple(errors.not_finite),
            quantizer=self._used if computed else None,
        )
        if before is not None:
            # Also if that one failed: finished shards are kept.
            wait([before])
        self._journal.record(finished)
        return finished

    def _work(self, filling: _Filling) -> None:
        """Take batch after batch until none is left."""
        writer, left = filling.writer, filling.left
        while True:
            self._keep_pace(filling)
            batch = left.take()
            if not batch:
                return
            self._make(batch, filling)
            # One worker digests while the others work, but only as long as a few workers need to
            # keep up, because many would wait for it.
            size_bytes = sum(item.source_bytes for _, item in batch)
            while writer.digest(2 * size_bytes) and left:
                pass
            for _, item in batch:
                where = self._plan.model.whereabouts(item.name)
                self._progress.advance(item.source_bytes, where)
                if self._on_done is not None:
                    self._on_done(item.name)

    def _keep_pace(self, filling: _Filling) -> None:
        """Wait while too much memory waits for digest and disk.

        With one shard at a time, being ahead of the digest gains nothing, and the data would go
        through the page cache and be read back. More workers continue with the next shard.
        """
        writer = filling.writer
        while self._one_digest and not self._results.has_room:
            # All other workers may be waiting, too, so this one must help.
            if writer.digest(COPY_CHUNK_BYTES) or writer.wait_for_disk():
                continue
            if not writer.has_pending_work and all(one.done() for one in filling.finishing):
                # What waits lies beyond a gap that only remaining items fill: parts of stacks and
                # tensors of odd sizes are not written in the file's order.
                return
            self._results.wait_for_room(_PAUSE_SECONDS)

    def _make(self, batch: Sequence[tuple[int, Item]], filling: _Filling) -> None:
        number, item = batch[0]
        writer = filling.writer
        if isinstance(item, Unit) and len(item.tiles) > 1:
            filling.errors[number] = _Found([self._convert_in_tiles(item, writer)])
        elif isinstance(item, Unit):
            self._convert(batch, filling)
        else:
            if item.is_bias:
                check_bias(self._source, item.info)
            if (fault := self._copy(item, writer)) is not None:
                filling.errors[number] = _Found(not_finite=[fault])

    def _convert(self, batch: Sequence[tuple[int, Item]], filling: _Filling) -> None:
        writer = filling.writer
        units = [(number, item) for number, item in batch if isinstance(item, Unit)]
        assert len(units) == len(batch), batch
        position = writer.position(units[0][1].first_tensor(self._plan.dialect))
        memory = self._results.acquire(position)
        tensors: dict[str, Tensor] = {}
        for number, unit in units:
            # A failed unit leaves tensors in it, and this thread may get another unit.
            self._arena.clear()
            self._arena.begin_like(position)
            converted = convert_unit(
                self._source,
                unit,
                self._plan.dialect,
                self._quantizer,
                self._arena,
                memory,
                self._plan.statistics,
                self._device,
            )
            # `Batches` gives such units a batch of their own.
            assert len(batch) == 1 or not (converted.as_stored or converted.joined), unit.name
            filling.errors[number] = _Found(converted.requantization_errors, converted.gptq_errors)
            tensors |= converted.tensors
        self._write(replace(converted, tensors=tensors), memory, writer)

    def _convert_in_tiles(self, unit: Unit, writer: ShardWriter) -> RequantizationError:
        """Dequantize a weight some rows at a time; they follow one another in its tensor."""
        name, offset = unit.first_tensor(self._plan.dialect), 0
        errors: list[RequantizationError] = []
        for tile in unit.tiles:
            self._arena.clear()
            memory = self._results.acquire(writer.position(name, offset))
            converted = convert_unit(
                self._source, tile, self._plan.dialect, self._quantizer, self._arena, memory
            )
            errors += converted.requantization_errors
            chunk = tensor_bytes(converted.tensors.pop(name))
            self._hand_over(memory, writer, partial(writer.write_bytes, name, offset, chunk))
            offset += len(chunk)
        self._arena.clear()
        return error_of_tiles(errors)

    def _write(self, converted: Converted, memory: Arena, writer: ShardWriter) -> None:
        if converted.as_stored:
            # The results lie in the arena they were read into; swap it with the unused memory.
            memory, self._arena = self._arena, memory
        if converted.joined:
            writer.write_all(converted.tensors)
            self._results.release(memory)
        else:
            self._hand_over(memory, writer, partial(writer.write_all, converted.tensors))
        converted.tensors.clear()
        self._arena.clear()

    def _hand_over(
        self, memory: Arena, writer: ShardWriter, write: Callable[[Callable[[], None] | None], None]
    ) -> None:
        """Share `memory` with digest and disk, waiting for room, and write from it."""
        release = self._results.share(memory)
        while release is None and writer.wait_for_disk():
            release = self._results.share(memory)
        write(release)
        if release is None:
            self._results.release(memory)

    def _copy(self, copy: Copy, writer: ShardWriter) -> str | None:
        """Copy a tensor; the first NaN or Inf in it, in words, or None."""
        name, size_bytes = copy.name, copy.info.size_bytes
        fault = None
        for offset in range(0, size_bytes, COPY_CHUNK_BYTES):
            memory = self._results.acquire(writer.position(name, offset))
            count = min(COPY_CHUNK_BYTES, size_bytes - offset)
            part = memory.empty((count,), dtype=torch.uint8)
            chunk = tensor_bytes(part)
            self._source.read_into(name, offset, chunk)
            # Before it is handed over: then it may be reused at any time.
            fault = fault or find_not_finite(part, copy.info, offset)
            self._hand_over(memory, writer, partial(writer.write_bytes, name, offset, chunk))
        return fault


class _ResultBuffers:
    """Memory for results, which digest and disk may still read when its worker has moved on.

    Args:
        allocate: as Arena.
        one_bytes: maximum size of the results in one buffer.
        size_bytes: maximum size of all buffers that are shared, or kept for reuse.
    """

    def __init__(self, allocate: Callable[[int], Tensor], one_bytes: int, size_bytes: int) -> None:
        self._new = partial(Arena, allocate, one_bytes)
        self._kept: deque[Arena] = deque()
        self._left_bytes = size_bytes
        self._shared_bytes = 0
        self._full_bytes = size_bytes
        self._changed = threading.Condition()

    def acquire(self, position: int) -> Arena:
        """Memory for one worker; its first tensor will be written to `position` of a file."""
        with self._changed:
            # The most recently released memory, which may still be in a processor's cache.
            memory = self._kept.pop() if self._kept else None
            self._left_bytes += memory.size_bytes if memory else 0
        memory = memory or self._new()
        memory.begin_like(position)
        return memory

    def share(self, memory: Arena) -> Callable[[], None] | None:
        """What to call when digest and disk have read `memory`; None if too much is shared."""
        with self._changed:
            while memory.size_bytes > self._left_bytes and self._kept:
                self._left_bytes += self._kept.popleft().size_bytes
            if memory.size_bytes > self._left_bytes:
                return None
            self._left_bytes -= memory.size_bytes
            self._shared_bytes += memory.size_bytes
        return partial(self._keep, memory)

    def release(self, memory: Arena) -> None:
        """Take back what was acquired and not shared."""
        keep = self.share(memory)
        if keep is not None:
            keep()

    @property
    def has_room(self) -> bool:
        """Whether at most three quarters are shared."""
        return 4 * self._shared_bytes <= 3 * self._full_bytes

    def wait_for_room(self, seconds: float) -> None:
        """Wait while more than three quarters are shared."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room, seconds)

    def _keep(self, memory: Arena) -> None:
        shared_bytes = memory.size_bytes
        memory.clear()  # may round its size up
        with self._changed:
            self._shared_bytes -= shared_bytes
            self._left_bytes -= memory.size_bytes - shared_bytes
            self._kept.append(memory)
            self._changed.notify_all()
