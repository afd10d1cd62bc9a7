"""Write the shards of a plan: read, quantize, write, a bounded number of units at a time."""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from moequant.checkpoint.writer import ShardWriter
from moequant.conversion.journal import FinishedShard
from moequant.conversion.plan import COPY_CHUNK_BYTES
from moequant.conversion.units import Copy, convert_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from moequant.checkpoint.source import Checkpoint
    from moequant.conversion.journal import Journal
    from moequant.conversion.plan import Plan, PlannedShard
    from moequant.conversion.units import Unit
    from moequant.progress import Progress


def write_shards(
    source: Checkpoint,
    plan: Plan,
    shards: Iterable[PlannedShard],
    journal: Journal,
    *,
    workers: int,
    progress: Progress,
) -> Iterator[FinishedShard]:
    """Write `shards` one after the other, each with `workers` threads, and record each.

    Every tensor has its place in the file, so the bytes do not depend on the number of workers.
    """
    with worker_pool(workers) as pool:
        for shard in shards:
            yield _write_shard(source, plan, shard, journal, pool, progress)


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


def _write_shard(
    source: Checkpoint,
    plan: Plan,
    shard: PlannedShard,
    journal: Journal,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> FinishedShard:
    writer = ShardWriter(journal.partial(shard.file), shard.header, shard.slots)

    def work(item: Unit | Copy) -> None:
        if isinstance(item, Copy):
            _copy(source, item, writer)
        else:
            for name, tensor in convert_unit(source, item, plan.dialect).items():
                writer.write(name, tensor)
        progress.advance(item.source_bytes, item.name)

    try:
        _run_all(pool, work, shard.items)
        size, sha256 = writer.finish()
    except BaseException:
        writer.abort()
        raise
    finished = FinishedShard(file=shard.file, bytes=size, sha256=sha256)
    journal.record(finished)
    return finished


def _run_all(
    pool: ThreadPoolExecutor, work: Callable[[Unit | Copy], None], items: Iterable[Unit | Copy]
) -> None:
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


def _copy(source: Checkpoint, copy: Copy, writer: ShardWriter) -> None:
    offset = 0
    for chunk in source.chunks(copy.info.name, COPY_CHUNK_BYTES):
        writer.write_bytes(copy.info.name, offset, chunk)
        offset += len(chunk)
