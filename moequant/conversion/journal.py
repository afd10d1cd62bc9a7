"""The work folder of an unfinished conversion, and the journal of its finished shards.

OUTPUT/.moequant/ contains:

    lock            locked while a conversion runs
    plan.json       digest of the plan, its settings, and the state of the source files
    journal.jsonl   one line per finished shard: file, size, SHA-256, quantizer
    shards/         finished shards, and unfinished ones
    source/         shards of the source that were fetched to be deleted, and samples of them
    staged/         during the commit: all other files of the output

A shard counts as finished only if its journal line is complete and a file with that size and digest
exists; all others are written again.
"""

from __future__ import annotations

import errno
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.conversion.finished_shard import FinishedShard, journal_line, parse_line
from moequant.errors import CheckpointError, MoequantError
from moequant.storage.disk import (
    append_to_file,
    explained,
    fsync_directory,
    replace_file,
    sha256_of,
)
from moequant.storage.documents import MAX_BYTES, REMEDY, read_document
from moequant.storage.files import WORK_FOLDER
from moequant.storage.lock import exclusive
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Collection
    from contextlib import AbstractContextManager
    from pathlib import Path

    from moequant.progress import Progress


_KINDS = {"plan_sha256": str, "source_state": dict, "recipe": dict}
"""What plan.json must have."""
_DIGESTS_AT_ONCE = 4
"""Finished shards whose digests are checked in parallel; four saturate most disks."""
_REMOVALS = 10
"""How often the work folder is removed, because a file in it disappeared at the same moment: a
fetch that a failed run of this process has left may be deleting its shard."""


class Journal:
    """The work folder of one output directory."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output / WORK_FOLDER
        self.shards = self.folder / "shards"
        self.staged = self.folder / "staged"
        self.source = self.folder / "source"
        self._lines = self.folder / "journal.jsonl"
        self._plan = self.folder / "plan.json"

    @property
    def exists(self) -> bool:
        """Whether a conversion into this directory was started but not committed."""
        return self._plan.exists()

    def read_plan(self) -> dict[str, Any]:
        """The content of plan.json: at least `plan_sha256`, `source_state` and `recipe`.

        Raises:
            MoequantError: it cannot be read, or is not as `begin` wrote it.
        """
        file = FixedFile.at(self._plan)
        try:
            recorded = read_document(file)
        except CheckpointError as error:
            why = str(error).removeprefix(f"{self._plan}: ").removesuffix(f"; {REMEDY}")
            raise self.damaged(why) from error
        for key, kind in _KINDS.items():
            if not isinstance(recorded.get(key), kind):
                found = show(recorded[key]) if key in recorded else "not there"
                wanted = "a text" if kind is str else "an object"
                raise self.damaged(f"{key} is {found}, but must be {wanted}")
        return recorded

    def damaged(self, why: str) -> MoequantError:
        """The error that plan.json is damaged."""
        return MoequantError(
            f"{self._plan}: damaged: {why}. It says which conversion is unfinished, so that one "
            "cannot continue; start over with --overwrite (overwrite=True)"
        )

    def begin(self, record: dict[str, Any]) -> None:
        """Remove earlier work and record the plan.

        The old plan is removed first and the new one written last, so that a plan never exists
        together with shards or lines of another.
        """
        left = [
            path for path in (self._plan, self._lines, self.shards, self.source) if path.exists()
        ]
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if left:
            fsync_directory(self.folder)
        self.shards.mkdir(parents=True)
        self._lines.touch()
        replace_file(self._plan, json.dumps(record, indent=2).encode())

    def shard_bytes(self) -> int:
        """The space of earlier shards, also of the source, which `begin` frees."""
        # Allocated blocks instead of sizes, because an unfinished shard may be sparse.
        folders = (folder.rglob("*") for folder in (self.shards, self.source) if folder.exists())
        return sum(512 * path.lstat().st_blocks for paths in folders for path in paths)

    def close(self) -> None:
        """Remove the work folder of a committed conversion, or of none.

        The plan is removed first: a folder without it is not an unfinished conversion.
        """
        self._plan.unlink(missing_ok=True)
        fsync_directory(self.folder)
        for left in reversed(range(_REMOVALS)):
            try:
                shutil.rmtree(self.folder)
                return
            except FileNotFoundError:
                if not self.folder.exists():
                    return
                if not left:
                    raise
            except OSError as error:
                # Another run may have created a new lock here meanwhile; it removes the folder.
                if error.errno != errno.ENOTEMPTY:
                    raise
                return

    def check_work_folder(self) -> None:
        """Check that the work folder is a folder, and its entries files; no links, no pipes."""
        for folder in (self.folder, self.shards, self.staged, self.source):
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                kind = "link" if folder.is_symlink() else "file"
                raise MoequantError(
                    f"{folder}: a {kind}, but must be a folder for unfinished work; remove it and "
                    "run again"
                )
        for file in (self._plan, self._lines):
            # Reading from a pipe would block forever.
            if file.exists() and not file.is_file():
                raise MoequantError(
                    f"{file}: not a file, but must be a file about unfinished work; remove it "
                    "and run again"
                )

    def lock(self) -> AbstractContextManager[None]:
        """Lock the output directory; raises MoequantError if another process holds the lock."""
        return exclusive(self.folder, "conversion")

    def partial(self, file: str) -> Path:
        """The path of a shard while it is written."""
        return self.shards / f"{file}.partial"

    def record(self, shard: FinishedShard) -> None:
        """Rename a finished shard and add it to the journal; the caller has fsynced its data."""
        self.partial(shard.file).replace(self.shards / shard.file)
        fsync_directory(self.shards)
        with explained(self._lines, "written"):
            append_to_file(self._lines, journal_line(shard))

    def resume(self, files: Collection[str], progress: Progress) -> dict[str, FinishedShard]:
        """The finished shards among `files`; each is read once to check its digest.

        Everything else in `shards` is removed to free its space.

        Raises:
            MoequantError: the journal exceeds MAX_BYTES, or a shard cannot be removed.
        """
        lines = self._read_lines()
        read = filter(None, map(parse_line, lines))
        entries = {entry.file: entry for entry in read if entry.file in files}
        places = self._locate_all(entries.values(), progress)
        self.shards.mkdir(exist_ok=True)
        for path in self.shards.iterdir():
            if path not in places.values():
                with explained(path, "removed"):
                    path.unlink()
        finished = {file: entries[file] for file in places}
        # Rewrite the journal if a line is incomplete or wrong, so that appended lines are valid.
        valid = [journal_line(entry) for entry in finished.values()]
        if lines != valid:
            replace_file(self._lines, b"".join(valid))
        return finished

    def _locate_all(self, shards: Collection[FinishedShard], progress: Progress) -> dict[str, Path]:
        """The paths of those shards that are whole, by name of the file."""
        if not shards:
            return {}
        places = {}
        progress.start("checking finished shards", sum(shard.bytes for shard in shards))
        with ThreadPoolExecutor(_DIGESTS_AT_ONCE) as pool:
            for shard, place in zip(shards, pool.map(self.locate, shards), strict=True):
                if place is not None:
                    places[shard.file] = place
                progress.advance(shard.bytes, shard.file)
        progress.finish()
        return places

    def locate(self, shard: FinishedShard) -> Path | None:
        """The path of a finished shard: in the work folder or, during a commit, the output."""
        for path in (self.shards / shard.file, self.output / shard.file):
            whole = path.is_file() and path.stat().st_size == shard.bytes
            if whole and sha256_of(path) == shard.sha256:
                return path
        return None

    def _read_lines(self) -> list[bytes]:
        """Lines of the journal with line ends; the last may be incomplete.

        Raises:
            MoequantError: it exceeds MAX_BYTES.
        """
        if not self._lines.exists():
            return []
        size = self._lines.stat().st_size
        if size > MAX_BYTES:
            raise MoequantError(
                f"{self._lines}: {size} bytes, too many for a journal, which has at most "
                f"{MAX_BYTES}; remove it and run again, which converts all shards"
            )
        return self._lines.read_bytes().splitlines(keepends=True)


def is_unfinished(output: Path) -> bool:
    """Whether a conversion into a directory was started but not committed."""
    return Journal(output).exists
