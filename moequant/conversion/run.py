"""Write the shards of a plan: read, quantize, write, digest, a bounded number of units at a time.

Each worker takes a unit through all steps in memory of its own that it keeps for the next unit, and
after each digests what the file has got from its start on, if no other worker is at it. So the
digest needs no thread, reads what is still in memory, and is nearly done when the last unit is.
Many workers outrun it: SHA-256 goes through a file from front to back. So while some filled shards
are digested to their end and brought to disk, the workers are at the next.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from moequant.checkpoint.buffers import Arena
from moequant.checkpoint.writer import ShardWriter
from moequant.conversion.journal import FinishedShard
from moequant.conversion.losses import merged
from moequant.conversion.plan import COPY_CHUNK_BYTES
from moequant.conversion.units import Copy, Unit, check_bias, convert_unit, restore
from moequant.conversion.used import UsedQuantizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from moequant.checkpoint.source import Checkpoint
    from moequant.conversion.journal import Journal
    from moequant.conversion.losses import Loss
    from moequant.conversion.plan import Plan, PlannedShard
    from moequant.conversion.units import Item, Restored
    from moequant.progress import Progress
    from moequant.quantizers import Choice

_WORKERS_A_FINISHER = 4
"""To make a shard takes a core 1.5 to 2.6 times as long as to digest it."""


def write_shards(
    source: Checkpoint,
    plan: Plan,
    shards: Iterable[PlannedShard],
    journal: Journal,
    *,
    choice: Choice,
    workers: int,
    progress: Progress,
) -> Iterator[FinishedShard]:
    """Write `shards` one after the other, each with `workers` threads, and record each.

    Every tensor has its place in the file, so the bytes do not depend on the number of workers.
    Filled shards are finished in threads of their own, one for each four workers. Each of them, and
    the one that is being filled, takes a descriptor and 256 KiB.
    """
    run = _Run(source, plan, journal, choice, progress)
    finishers = max(1, workers // _WORKERS_A_FINISHER)
    with ThreadPoolExecutor(finishers, "moequant-finish") as finisher, worker_pool(workers) as pool:
        finishing: deque[Future[FinishedShard]] = deque()
        for shard in shards:
            writer, losses = run.fill(shard, pool)
            before = finishing[-1] if finishing else None
            finishing.append(finisher.submit(run.finish, shard, writer, losses, before))
            if len(finishing) > finishers:
                yield finishing.popleft().result()
        while finishing:
            yield finishing.popleft().result()


@contextmanager
def worker_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads with one intra-op thread each: units are small, and workers fill the cores."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, "moequant", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        # torch passes the number on to libraries that keep one for the whole process.
        torch.set_num_threads(before)


class _Run(threading.local):
    """What the shards of one conversion share; the memory is each thread's own."""

    def __init__(
        self,
        source: Checkpoint,
        plan: Plan,
        journal: Journal,
        choice: Choice,
        progress: Progress,
    ) -> None:
        self._source = source
        self._plan = plan
        self._journal = journal
        self._quantizer = choice.quantizer
        self._used = UsedQuantizer(name=choice.quantizer.name, reason=choice.reason)
        self._progress = progress
        self._arena = Arena(choice.quantizer.allocate)

    def fill(
        self, shard: PlannedShard, pool: ThreadPoolExecutor
    ) -> tuple[ShardWriter, tuple[Loss, ...]]:
        """Write all that goes into a shard; what is lost of it comes in the order of the plan."""
        writer = ShardWriter(self._journal.partial(shard.file), shard.header, shard.pieces)
        try:
            lost = _run_all(pool, partial(self._work, writer), shard.items)
        except BaseException:
            writer.abort()
            raise
        return writer, tuple(merged(loss for of_item in lost for loss in of_item))

    def finish(
        self,
        shard: PlannedShard,
        writer: ShardWriter,
        losses: tuple[Loss, ...],
        before: Future[FinishedShard] | None,
    ) -> FinishedShard:
        """Bring a filled shard to disk and, once `before` is recorded, record it."""
        try:
            size, sha256 = writer.finish()
        except BaseException:
            writer.abort()
            raise
        quantized = any(isinstance(item, Unit) for item in shard.items)
        finished = FinishedShard(
            file=shard.file,
            bytes=size,
            sha256=sha256,
            losses=losses,
            quantizer=self._used if quantized else None,
        )
        if before is not None:
            # Whatever became of it: what is finished is kept.
            wait([before])
        self._journal.record(finished)
        return finished

    def _work(self, writer: ShardWriter, item: Item) -> list[Loss]:
        losses: list[Loss] = []
        if isinstance(item, Copy):
            if item.is_bias:
                check_bias(self._source, item.info)
            _copy(self._source, item, writer)
        else:
            losses = self._convert(item, writer)
        # Enough for a few workers to keep up, and no more: many would wait for this one.
        writer.digest(2 * item.source_bytes)
        self._progress.advance(item.source_bytes, item.name)
        return losses

    def _convert(self, item: Unit | Restored, writer: ShardWriter) -> list[Loss]:
        if isinstance(item, Unit):
            tensors, losses = convert_unit(
                self._source, item, self._plan.dialect, self._quantizer, self._arena
            )
        else:
            tensors, losses = restore(self._source, item, self._arena)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        tensors.clear()
        self._arena.clear()
        return losses


def _run_all(
    pool: ThreadPoolExecutor, work: Callable[[Item], list[Loss]], items: Iterable[Item]
) -> list[list[Loss]]:
    """Work on all items; on the first error, drop what has not begun and wait for the rest."""
    futures = [pool.submit(work, item) for item in items]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    return [future.result() for future in futures]


def _copy(source: Checkpoint, copy: Copy, writer: ShardWriter) -> None:
    offset = 0
    for chunk in source.chunks(copy.info.name, COPY_CHUNK_BYTES):
        writer.write_bytes(copy.info.name, offset, chunk)
        offset += len(chunk)
