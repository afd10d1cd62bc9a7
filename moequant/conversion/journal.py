"""What an interrupted conversion has already finished.

Everything unfinished lies in OUTPUT/.moequant/:

    lock            held while a conversion runs
    plan.json       which plan this is, and the state of the source files it was made from
    journal.jsonl   one line for each finished shard: file, size, SHA-256
    shards/         finished shards, and the partial ones being written

A shard counts as finished only if its journal line is whole and a file of that size and digest is
there; anything else is written again.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moequant.checkpoint.files import WORK_FOLDER
from moequant.checkpoint.lock import exclusive
from moequant.checkpoint.writer import fsync_directory, replace_file, sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FinishedShard:
    """A shard that is whole on disk."""

    file: str
    bytes: int
    sha256: str


class Journal:
    """The work folder of one output directory."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output / WORK_FOLDER
        self.shards = self.folder / "shards"
        self._lines = self.folder / "journal.jsonl"
        self._plan = self.folder / "plan.json"

    @property
    def exists(self) -> bool:
        """Whether a conversion into this directory was begun and not committed."""
        return self._plan.exists()

    def read_plan(self) -> dict[str, Any]:
        """What `begin` recorded; empty if that is unreadable."""
        try:
            recorded = json.loads(self._plan.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return recorded if isinstance(recorded, dict) else {}

    def begin(self, record: dict[str, Any]) -> None:
        """Start afresh: forget earlier work and record the plan."""
        shutil.rmtree(self.shards, ignore_errors=True)
        self._lines.unlink(missing_ok=True)
        self.shards.mkdir(parents=True)
        replace_file(self._plan, json.dumps(record, indent=2).encode())

    def lock(self) -> AbstractContextManager[None]:
        """Hold the output directory against a second run.

        Raises:
            MoequantError: another process holds it.
        """
        return exclusive(self.folder, "conversion")

    def partial(self, file: str) -> Path:
        """Where a shard is written before it is whole."""
        return self.shards / f"{file}.partial"

    def record(self, shard: FinishedShard) -> None:
        """Give a finished shard its name and note it; the caller has synced its data."""
        self.partial(shard.file).replace(self.shards / shard.file)
        fsync_directory(self.shards)
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(shard)) + "\n")
            lines.flush()
            os.fsync(lines.fileno())

    def finished(self) -> dict[str, FinishedShard]:
        """Shards that need not be written again; each is read once to check its digest."""
        entries = {entry.file: entry for entry in self._entries()}
        return {file: entry for file, entry in entries.items() if self.locate(entry) is not None}

    def locate(self, shard: FinishedShard) -> Path | None:
        """Where a finished shard lies: in the work folder or, after a commit began, the output."""
        for path in (self.shards / shard.file, self.output / shard.file):
            whole = path.is_file() and path.stat().st_size == shard.bytes
            if whole and sha256_of(path) == shard.sha256:
                return path
        return None

    def _entries(self) -> Iterator[FinishedShard]:
        try:
            lines = self._lines.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return
        for line in lines:
            # None for the line being written when the power went; its shard is written again.
            if (shard := _parse(line)) is not None:
                yield shard


def _parse(line: str) -> FinishedShard | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    types = {"file": str, "bytes": int, "sha256": str}
    if not isinstance(entry, dict) or {k: type(v) for k, v in entry.items()} != types:
        return None
    return FinishedShard(**entry)
