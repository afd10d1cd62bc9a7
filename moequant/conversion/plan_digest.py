"""One digest of all that decides the bytes of an output; equal for equal plans."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from moequant._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moequant.conversion.shards import PlannedShard
    from moequant.conversion.units import Unit
    from moequant.dialects.base import Dialect
    from moequant.storage.headers import TensorInfo
    from moequant.weights.source_model import SourceModel


def describe_files(
    tensors: Mapping[str, TensorInfo], file_bytes: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Size and header digest of every weight file, by name, sorted."""
    rows: dict[str, list[tuple[Any, ...]]] = {file: [] for file in sorted(file_bytes)}
    for info in sorted(tensors.values(), key=lambda info: info.start):
        rows[info.file].append((info.name, info.dtype, info.shape, info.start, info.stop))
    return {
        file: {"bytes": file_bytes[file], "header_sha256": _sha256_of_json(entries)}
        for file, entries in rows.items()
    }


def plan_digest(
    units: Iterable[Unit],
    dialect: Dialect,
    shards: Iterable[PlannedShard],
    quantization_config: Mapping[str, Any],
    source: SourceModel,
    source_files: Mapping[str, Any],
) -> str:
    """SHA-256 over everything that determines the output's bytes."""
    own = source.model.architecture.definition
    decided: dict[str, Any] = {
        **({} if own is None else {"architecture": own}),
        "moequant": __version__,
        "units": [[[w.info.name for w in u.weights], u.format, dict(u.options)] for u in units],
        "dialect": dialect.name,
        "quantization_config": quantization_config,
        "source_files": source_files,
        "shards": {s.file: hashlib.sha256(s.header).hexdigest() for s in shards},
    }
    if source.dialect is not None:
        # How the source is decoded, and which units may be requantized without loss.
        decided["source_quantization"] = source.quantization_config
        decided["lossless"] = [unit.lossless for unit in units]
    return _sha256_of_json(decided)


def _sha256_of_json(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
