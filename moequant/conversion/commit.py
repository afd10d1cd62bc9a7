"""Turn finished shards into a checkpoint, config.json last.

No loader takes a directory without config.json for a model, so an output that is not whole never
loads. Every step can be repeated: a crash in between is mended by running the same command again.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch

from moequant._version import __version__
from moequant.checkpoint.files import CONFIG_FILE, INDEX_FILE, PREPARED_FOLDER, RECORD_FILE
from moequant.checkpoint.writer import fsync_directory, replace_file
from moequant.conversion.target import read_record, recorded_sidecars

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from moequant.checkpoint.source import Checkpoint
    from moequant.conversion.journal import FinishedShard, Journal
    from moequant.conversion.plan import Plan

_STAGE = "sidecars"

# Left by an earlier quantization; engines would believe them over config.json.
OTHER_QUANTIZATION = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def commit(
    source: Checkpoint,
    plan: Plan,
    journal: Journal,
    finished: Iterable[FinishedShard],
    sidecars: Iterable[Path],
    provenance: Mapping[str, Any],
) -> None:
    """Move shards into place, then the files that come along, the record, the index, the config."""
    output = journal.output
    shards = list(finished)
    staged = [_stage(source.path, file, journal) for file in sidecars]
    record = _encode(_record(plan, shards, provenance))
    index = _encode(plan.index())
    config = _encode(converted_config(source.config, plan.quantization_config))
    _retire_old_output(output, keep={shard.file for shard in shards})
    for shard in shards:
        if (journal.shards / shard.file).exists():
            (journal.shards / shard.file).replace(output / shard.file)
    for file in staged:
        (output / file).parent.mkdir(parents=True, exist_ok=True)
        (journal.folder / _STAGE / file).replace(output / file)
    replace_file(output / RECORD_FILE, record)
    replace_file(output / INDEX_FILE, index)
    fsync_directory(output)
    replace_file(output / CONFIG_FILE, config)
    shutil.rmtree(journal.folder)


def converted_config(
    config: Mapping[str, Any], quantization_config: Mapping[str, Any]
) -> dict[str, Any]:
    """The source's config.json with our `quantization_config`, and no stale one beside it."""
    result = dict(config)
    text_config = result.get("text_config")
    if isinstance(text_config, dict):
        result["text_config"] = {k: v for k, v in text_config.items() if k != "quantization_config"}
    result["quantization_config"] = dict(quantization_config)
    return result


def _retire_old_output(output: Path, keep: set[str]) -> None:
    """Remove an earlier conversion, its config first so that it never loads half replaced."""
    stale = recorded_sidecars(read_record(output))
    for name in (CONFIG_FILE, INDEX_FILE, RECORD_FILE, *OTHER_QUANTIZATION, *stale):
        path = output / name
        # A record may have been edited: nothing outside the output is removed by it.
        if path.resolve().is_relative_to(output.resolve()):
            path.unlink(missing_ok=True)
    for path in output.glob("*.safetensors"):
        if path.name not in keep:
            path.unlink()
    shutil.rmtree(output / PREPARED_FOLDER, ignore_errors=True)
    fsync_directory(output)


def _stage(folder: Path, file: Path, journal: Journal) -> Path:
    """Bring a file that comes along to the output's disk, where it need only be renamed."""
    staged = journal.folder / _STAGE / file
    staged.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / file, staged)
    with staged.open("rb") as copy:
        os.fsync(copy.fileno())
    return file


def _encode(content: Mapping[str, Any]) -> bytes:
    # ASCII, as transformers writes it; the rest is escaped, lone surrogates too.
    return (json.dumps(content, indent=2) + "\n").encode()


def _record(
    plan: Plan, shards: Iterable[FinishedShard], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """What moequant.json says: enough to repeat the conversion and to check every byte."""
    return {
        "schema_version": 1,
        "moequant": __version__,
        "torch": torch.__version__,
        "source": {**provenance, "files": plan.source_files},
        "architecture": plan.model.architecture.name,
        "dialect": plan.dialect.name,
        "recipe": plan.recipe.model_dump(mode="json"),
        "plan_sha256": plan.digest,
        "shards": {s.file: {"bytes": s.bytes, "sha256": s.sha256} for s in shards},
    }
