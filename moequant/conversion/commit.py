"""Turn finished shards into a checkpoint, config.json last.

No loader accepts a directory without config.json, so an incomplete output never loads. Every step
can be repeated: after a crash, running the same command again completes the commit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import torch

from moequant._version import __version__
from moequant.conversion.finished_shard import shares
from moequant.conversion.merging import merged_errors
from moequant.conversion.output_directory import replaced_files
from moequant.conversion.record import claims_of, converted_config
from moequant.errors import CheckpointError
from moequant.storage.disk import explained, fsync_directory, sha256_of, write_file
from moequant.storage.files import (
    CONFIG_FILE,
    INDEX_FILE,
    PREPARED_FOLDER,
    RECORD_FILE,
)
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from moequant.conversion.finished_shard import FinishedShard
    from moequant.conversion.journal import Journal
    from moequant.conversion.plan import Plan
    from moequant.storage.checkpoint import Checkpoint

_CHUNK_BYTES = 8 << 20


def commit(
    source: Checkpoint,
    plan: Plan,
    journal: Journal,
    finished: Sequence[FinishedShard],
    provenance: Mapping[str, Any],
) -> None:
    """Move record, shards, sidecar files, index and config.json into place, in this order.

    Everything is on the output's disk before an earlier conversion is removed; the renames that
    remain need no space. `finished` are all shards of the plan; `provenance` as `claims_of`.

    Raises:
        CheckpointError: a sidecar file cannot be read, or has changed.
        MoequantError: the output cannot be written.
    """
    output = journal.output
    sidecars = _stage(source, plan, journal, finished, provenance)
    for file in sidecars:
        (output / file).parent.mkdir(parents=True, exist_ok=True)
    _retire_old_output(output, keep={shard.file for shard in finished})
    # The record comes first: if another conversion replaces this one after a crash, it learns from
    # the record which files to remove.
    _move(journal.staged, output, [RECORD_FILE])
    _move(journal.shards, output, [shard.file for shard in finished])
    _move(journal.staged, output, [*sidecars, INDEX_FILE])
    _move(journal.staged, output, [CONFIG_FILE])
    journal.close()


def _stage(
    source: Checkpoint,
    plan: Plan,
    journal: Journal,
    shards: Sequence[FinishedShard],
    provenance: Mapping[str, Any],
) -> list[str]:
    """Write all files except shards into the work folder; returns the names of sidecar files."""
    if journal.staged.exists():
        shutil.rmtree(journal.staged)
    journal.staged.mkdir()
    for file, sha256 in provenance["sidecars"].items():
        _copy(source.path / file, journal.staged / file, sha256)
    written = planned_files(source, plan)
    record = _encode(_record(plan, shards, written, provenance))
    for file, data in {**written, RECORD_FILE: record}.items():
        _write(journal.staged / file, [memoryview(data)])
    fsync_directory(journal.staged)
    return list(provenance["sidecars"])


def planned_files(source: Checkpoint, plan: Plan) -> dict[str, bytes]:
    """The bytes of the index and of config.json, by file; source and plan determine them."""
    config = converted_config(source.config, plan.quantization_config, plan.dialect)
    return {INDEX_FILE: _encode(plan.index()), CONFIG_FILE: _encode(config)}


def file_entries(written: Mapping[str, bytes]) -> dict[str, dict[str, object]]:
    """What moequant.json says of files, by file, from their bytes."""
    return {
        file: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for file, data in written.items()
    }


def _copy(source: Path, target: Path, sha256: str) -> None:
    """Copy a sidecar file and fsync it; raises CheckpointError if its digest has changed."""
    file = FixedFile.at(source)
    _write(target, file.chunks(0, file.size_bytes, _CHUNK_BYTES))
    if sha256_of(target) != sha256:
        raise CheckpointError(
            f"{source}: changed while in use; wait until nothing writes to it and run the command "
            "again"
        )


def _write(target: Path, chunks: Iterable[memoryview]) -> None:
    """Write and fsync a file in the work folder, where an incomplete file does no harm."""
    with explained(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, chunks)


def _move(folder: Path, output: Path, files: Iterable[str]) -> None:
    """Rename files into the output, except those that an earlier attempt has moved."""
    parents = {output}
    for file in files:
        target = output / file
        if (folder / file).exists():
            (folder / file).replace(target)
        parents |= {p for p in target.parents if p.is_relative_to(output)}
    for parent in sorted(parents):
        fsync_directory(parent)


def _retire_old_output(output: Path, keep: set[str]) -> None:
    """Remove an earlier conversion, config.json first, so that it never loads partly replaced.

    Its record is removed last, because it lists the files to remove. `keep` are shards of the new
    one that an earlier attempt has moved.
    """
    for file in replaced_files(output):
        if file in keep:
            continue
        path = output / file
        # A record may have been edited: remove no folder, and nothing outside the output.
        inside = path.parent.resolve().is_relative_to(output.resolve())
        if inside and (path.is_file() or path.is_symlink()):
            path.unlink()
            if file == CONFIG_FILE:
                fsync_directory(output)
    prepared = output / PREPARED_FOLDER
    if prepared.is_symlink():
        prepared.unlink()
    elif prepared.exists():
        shutil.rmtree(prepared)
    fsync_directory(output)


def _encode(content: Mapping[str, Any]) -> bytes:
    # ASCII, as transformers writes it; the rest is escaped, lone surrogates too.
    return (json.dumps(content, indent=2) + "\n").encode()


def _record(
    plan: Plan,
    shards: Sequence[FinishedShard],
    written: Mapping[str, bytes],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """What moequant.json says: enough to repeat the conversion and to check every byte."""
    errors = merged_errors(error for shard in shards for error in shard.requantization_errors)
    rounded = merged_errors(error for shard in shards for error in shard.gptq_errors)
    return {
        "schema_version": 1,
        "moequant": __version__,
        "torch": torch.__version__,
        **claims_of(plan, provenance),
        "recipe": plan.recipe.model_dump(mode="json"),
        "plan_sha256": plan.digest,
        "shards": {s.file: {"bytes": s.bytes, "sha256": s.sha256} for s in shards},
        "quantizers": [share.record() for share in shares(shards)],
        "files": file_entries(written),
        **({"requantization_errors": [error.to_json() for error in errors]} if errors else {}),
        **({"gptq_errors": [error.to_json() for error in rounded]} if rounded else {}),
    }
