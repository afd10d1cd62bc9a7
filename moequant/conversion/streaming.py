"""Convert a repository on the hub while its shards are fetched.

Threads fetch shards in the order in which the plan reads them, whole, and compare each with the
SHA-256 that the hub's list gives; reads of the conversion wait for them. They go to the hub's cache
and stay there. To delete them, they go to the work folder of the output instead, and are removed
once no remaining item reads them, or when there are more than `KEPT_SHARDS`. That does not wait for
an output shard to be finished, which may need more source shards than there is room for: after a
kill, those of the unfinished output shard are fetched again.

The items of an output shard are converted in the order of the source's files, not of the output's:
a source often has the tensors of a layer in another order, and one shard after the other is read.
"""

from __future__ import annotations

import shutil
import uuid
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moequant.conversion.items import stored_in
from moequant.conversion.source_identity import content_digests, source_digests
from moequant.conversion.source_samples import ShardSample
from moequant.conversion.units import Copy
from moequant.storage.disk import explained
from moequant.storage.hub_folder import HubFolder
from moequant.storage.reader import FixedFile
from moequant.storage.shard_store import ShardStore, StreamedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moequant.conversion.journal import Journal
    from moequant.conversion.shards import PlannedShard
    from moequant.conversion.units import Item
    from moequant.progress import Progress
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo

KEPT_SHARDS = 4
"""Source shards that are on the disk at once at most, if they are deleted: as large as so many of
the largest."""

_AT_ONCE, _AT_ONCE_DELETED = 4, 2
"""Shards fetched at the same time, because one connection to a CDN is slower than most networks."""
_SHARDS, _SAMPLES = "files", "samples"
"""Folders in the work folder's `source`."""


def kept_bytes(checkpoint: Checkpoint) -> int:
    """What fetched shards, and samples of them, take at most if they are deleted."""
    sizes = _absent(checkpoint).values()
    samples = sum(sample.size_bytes for sample in _samples(checkpoint, checkpoint.path).values())
    return min(KEPT_SHARDS * max(sizes, default=0), sum(sizes) + samples)


class Stream:
    """A checkpoint on the hub whose shards are fetched while it is read.

    Args:
        checkpoint: opened from headers.
        todo: the output shards that will be written, in order.
        journal: the work folder of the output.
        delete: whether fetched shards are deleted.

    Attributes:
        checkpoint: the checkpoint; its reads wait for shards.
        todo: the output shards in the order of work that shards are fetched for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        todo: Sequence[PlannedShard],
        journal: Journal,
        *,
        delete: bool,
    ) -> None:
        assert isinstance(checkpoint.folder, HubFolder)
        self._repository = checkpoint.folder.repository
        self._opened = checkpoint
        # A folder of its own: a fetch of a run that failed in this process may still go on.
        self._folder = journal.source / _SHARDS / uuid.uuid4().hex if delete else None
        self._samples: Mapping[str, ShardSample] = {}
        sizes = _absent(checkpoint)
        self.todo = [_in_source_order(shard, checkpoint) for shard in todo]
        steps = [
            (item.name, _files(item, checkpoint))
            for shard in self.todo
            for item in (shard.items[number] for number in shard.order)
        ]
        if delete:
            self._samples = _samples(checkpoint, journal.source / _SAMPLES)
            read = {file for _, files in steps for file in files}
            # What was converted and deleted before is not fetched again.
            sizes = {
                file: size
                for file, size in sizes.items()
                if file in read or not self._samples[file].exists
            }
        self._store = ShardStore(
            sizes,
            steps,
            self._fetch,
            at_once=_AT_ONCE_DELETED if delete else _AT_ONCE,
            budget_bytes=_budget_bytes(checkpoint, self._samples) if delete else None,
        )
        streamed = {
            file: StreamedFile(
                path=checkpoint.folder.shown / file,
                size_bytes=size,
                mtime_ns=0,
                store=self._store,
                name=file,
            )
            for file, size in sizes.items()
        }
        self.checkpoint = replace(checkpoint, files={**checkpoint.files, **streamed})

    @contextmanager
    def running(self) -> Iterator[Stream]:
        """Fetch shards meanwhile."""
        from huggingface_hub.utils import (  # type: ignore[attr-defined] # documented, all three
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        # Bars of downloads would be drawn over that of the conversion.
        hidden = are_progress_bars_disabled()
        if not hidden:
            disable_progress_bars()
        self._store.start()
        try:
            yield self
        finally:
            self._store.stop()
            if not hidden:
                enable_progress_bars()
        # Before the work folder is removed, where a thread may be removing a shard.
        self._store.join()

    def finished(self, item: str) -> None:
        """Note that the item with this name is done and will not be read again."""
        self._store.finished(item)

    def digests(
        self, sidecars: Iterable[Path], *, hash_source: bool, workers: int, progress: Progress
    ) -> dict[str, Any]:
        """As `source_digests`, and with `hash_source` as `content_digests`.

        Raises:
            CheckpointError: a shard that no remaining item reads cannot be fetched.
        """
        self._store.wait_until_complete()
        kept = {file: FixedFile.at(path) for file, path in self._cached().items()}
        local = replace(
            self._opened, files={f: kept.get(f, o) for f, o in self.checkpoint.files.items()}
        )
        gone = {file: sample for file, sample in self._samples.items() if file not in kept}
        found = source_digests(local, sidecars, gone)
        if not hash_source:
            return found
        here = replace(local, files=kept)
        digests = content_digests(here, workers, progress)["content_sha256"]
        digests |= {file: sample.sha256 for file, sample in gone.items()}
        return {**found, "content_sha256": {file: digests[file] for file in local.files}}

    def _cached(self) -> dict[str, Path]:
        """Shards that are in the hub's cache."""
        places = {file: self._repository.cached(file) for file in self._opened.files}
        return {file: path for file, path in places.items() if path is not None}

    def _fetch(self, file: str) -> Path:
        path = self._repository.fetch(file, self._folder)
        shard = FixedFile.at(path)
        sha256 = shard.sha256()
        self._repository.check_digest(file, path, sha256)
        if self._folder is not None and not self._samples[file].exists:
            self._samples[file].write(shard, sha256)
        return path


def remove_fetched(journal: Journal, *, keep_samples: bool) -> None:
    """Remove the shards that an interrupted run fetched to delete them.

    They and those that will be fetched could exceed the limit together.
    """
    folder = journal.source / _SHARDS if keep_samples else journal.source
    with explained(folder, "removed"):
        if folder.exists():
            shutil.rmtree(folder)


def _absent(checkpoint: Checkpoint) -> dict[str, int]:
    """Sizes of the weight files that are not on a disk here."""
    return {f: opened.size_bytes for f, opened in checkpoint.files.items() if not opened.is_local}


def _samples(checkpoint: Checkpoint, folder: Path) -> dict[str, ShardSample]:
    """Samples of the shards that are not on a disk here."""
    infos: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in checkpoint.tensors.values():
        infos[info.file].append(info)
    return {file: ShardSample(folder / file, infos[file]) for file in _absent(checkpoint)}


def _budget_bytes(checkpoint: Checkpoint, samples: Mapping[str, ShardSample]) -> int:
    """What fetched shards may take, so that with all samples they are as large as four shards."""
    largest = max(_absent(checkpoint).values(), default=0)
    taken = sum(sample.size_bytes for sample in samples.values())
    # Tiny tensors, as in tests, may have samples as large as themselves.
    return max(largest, KEPT_SHARDS * largest - taken)


def _in_source_order(shard: PlannedShard, checkpoint: Checkpoint) -> PlannedShard:
    """The shard with its items in the order of the source's files, by the last that each reads."""
    ranks = {file: rank for rank, file in enumerate(checkpoint.files)}
    last = [max(ranks[file] for file in _files(item, checkpoint)) for item in shard.items]
    return replace(shard, order=tuple(sorted(range(len(last)), key=last.__getitem__)))


def _files(item: Item, checkpoint: Checkpoint) -> set[str]:
    if isinstance(item, Copy):
        return {item.info.file}
    infos, norms = [weight.info for weight in item.weights], []
    if item.predicted is not None:
        infos, norms = [*infos, *item.predicted.before], [item.predicted.norm]
    parts = [part for info in infos for part in stored_in(info, checkpoint.tensors)]
    return {part.file for part in (*parts, *(checkpoint.tensors[norm] for norm in norms))}
