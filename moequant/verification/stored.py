"""The folder of a converted checkpoint, and the files in it that can be read.

`Checkpoint.open` stops at the first fault. Verification continues and lists all faults.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from moequant.errors import CheckpointError
from moequant.storage.checkpoint import Checkpoint, natural_key
from moequant.storage.documents import read_document
from moequant.storage.files import CONFIG_FILE, INDEX_FILE, RECORD_FILE
from moequant.storage.folder import (
    Folder,
    check_is_checkpoint,
    is_note,
    searched,
    sidecar_files,
    weight_files,
)
from moequant.storage.given_path import given_path
from moequant.storage.headers import read_header
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set
    from pathlib import Path

    from moequant.storage.headers import TensorInfo
    from moequant.verification.findings import Findings
    from moequant.verification.report import Check

    Headers = Mapping[str, Mapping[str, TensorInfo]]


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """The readable part of a converted checkpoint.

    Attributes:
        checkpoint: config.json, empty if unreadable, and the tensors of the readable files.
        index: the index; None if it is missing or unreadable.
        record: moequant.json; None if it is missing or unreadable.
        has_record: whether moequant.json exists.
        has_config: whether config.json is readable.
        lost: tensors that the index assigns to unreadable files.
    """

    checkpoint: Checkpoint
    index: Mapping[str, Any] | None
    record: Mapping[str, Any] | None
    has_record: bool
    has_config: bool
    lost: frozenset[str]


def existing_directory(converted: str | Path) -> Path:
    """The directory of a converted checkpoint.

    Raises:
        CheckpointError: there is none, nothing of a checkpoint is in it, a conversion into it is
            unfinished, or it holds what was prepared.
        UnsupportedError: `converted` is neither a text nor a path.
    """
    path = given_path("converted", converted)
    with searched(path):
        found = path.is_dir()
    if not found:
        raise CheckpointError(f"{path}: no such directory; name the converted checkpoint")
    check_is_checkpoint(path)
    with searched(path):
        if not any(_is_of_checkpoint(entry.name) for entry in path.iterdir()):
            raise CheckpointError(
                f"{path}: no checkpoint is in it, neither {CONFIG_FILE} nor a weight file; name "
                "the folder that moequant convert wrote"
            )
    return path


def _is_of_checkpoint(name: str) -> bool:
    """Whether a file of this name belongs to a checkpoint, be it whole or damaged."""
    return name in (CONFIG_FILE, INDEX_FILE, RECORD_FILE) or name.endswith(".safetensors")


def read_stored(path: Path, findings: Findings) -> StoredCheckpoint:
    """Read config, record, index and headers; faults are added to `findings`."""
    has_record = (path / RECORD_FILE).exists()
    config = _read_json(path, CONFIG_FILE, "config", findings)
    record = _read_json(path, RECORD_FILE, "record", findings) if has_record else None
    present = {entry.name for entry in path.glob("*.safetensors") if entry.name[0] != "."}
    index = None
    if has_record or len(present) != 1 or (path / INDEX_FILE).exists():
        index = _read_json(path, INDEX_FILE, "index", findings)
    weight_map = {} if index is None else _weight_map(index, findings)
    named = Counter(weight_map.values()) if weight_map else Counter(present)
    _compare_files(named, present, findings)
    files, headers = _read_headers(path, named.keys() & present, findings)
    tensors = _tensors(headers, weight_map)
    lost = {name for name, file in weight_map.items() if file not in headers} - tensors.keys()
    if weight_map:
        _check_weight_map(weight_map, headers, findings)
    if index is not None and not lost:
        _check_total_size(index, tensors, findings)
    return StoredCheckpoint(
        # The readable part of a checkpoint that `Checkpoint.open` may refuse.
        checkpoint=Checkpoint(
            folder=Folder(path=path),
            config=config or {},
            tensors=tensors,
            files=files,
            index_file=None if index is None else FixedFile.at(path / INDEX_FILE),
        ),
        index=index,
        record=record,
        has_record=has_record,
        has_config=config is not None,
        lost=frozenset(lost),
    )


def _read_json(path: Path, file: str, check: Check, findings: Findings) -> dict[str, Any] | None:
    try:
        return read_document(FixedFile.at(path / file))
    except CheckpointError as error:
        findings.add(check, file, str(error).removeprefix(f"{path / file}: "))
        return None


def _weight_map(index: Mapping[str, Any], findings: Findings) -> dict[str, str]:
    """The index's map of files by tensor; if it is missing, empty and a problem."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        findings.add("index", INDEX_FILE, "no weight_map of files by tensor")
        return {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            findings.add("index", name, f"the index says {file!r}, which is no file")
    return {name: file for name, file in weight_map.items() if isinstance(file, str)}


def _read_headers(
    path: Path, names: Iterable[str], findings: Findings
) -> tuple[dict[str, FixedFile], dict[str, dict[str, TensorInfo]]]:
    """The files that can be read, and their headers."""
    files: dict[str, FixedFile] = {}
    headers: dict[str, dict[str, TensorInfo]] = {}
    for name in sorted(names, key=natural_key):
        try:
            # Before reading the header, so that later reads detect any change.
            file = FixedFile.at(path / name)
            headers[name] = read_header(path / name, name)
        except CheckpointError as error:
            findings.add("files", name, str(error).removeprefix(f"{path / name}: "))
            continue
        files[name] = file
        _compare_with_safetensors(path / name, headers[name], findings)
    return files, headers


def _compare_files(named: Counter[str], present: set[str], findings: Findings) -> None:
    for file in sorted(present - named.keys(), key=natural_key):
        message = "no index entry leads here, yet some loaders read it; remove it"
        findings.add("files", file, message, stray=True)
    for file in sorted(named.keys() - present, key=natural_key):
        findings.add("files", file, f"missing, but the index lists {named[file]} tensors in it")


def _compare_with_safetensors(
    path: Path, header: Mapping[str, TensorInfo], findings: Findings
) -> None:
    """Also read the header with the safetensors library, which most loaders use."""
    try:
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            seen = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except SafetensorError as error:
        findings.add("files", path.name, f"safetensors refuses it: {error}")
        return
    ours = {name: (info.dtype, info.shape) for name, info in header.items()}
    for name in sorted(ours.items() ^ seen.items(), key=str):
        findings.add("files", path.name, f"the safetensors library reads another header: {name}")


def _tensors(headers: Headers, weight_map: Mapping[str, str]) -> dict[str, TensorInfo]:
    """Every tensor in natural order; for a duplicate name, the one that the index names."""
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for name, info in header.items():
            if name not in tensors or weight_map.get(name) == file:
                tensors[name] = info
    return {name: tensors[name] for name in sorted(tensors, key=natural_key)}


def _check_weight_map(weight_map: Mapping[str, str], headers: Headers, findings: Findings) -> None:
    elsewhere: set[str] = set()
    for file, header in headers.items():
        for name in header:
            if weight_map.get(name) != file:
                elsewhere.add(name)
                says = f"the index says {weight_map[name]}" if name in weight_map else "not indexed"
                findings.add("index", name, f"is in {file}, but {says}")
    for name, file in weight_map.items():
        if file in headers and name not in headers[file] and name not in elsewhere:
            findings.add("index", name, f"not in {file}, where the index puts it")


def _check_total_size(
    index: Mapping[str, Any], tensors: Mapping[str, TensorInfo], findings: Findings
) -> None:
    metadata = index.get("metadata")
    found = metadata.get("total_size") if isinstance(metadata, dict) else None
    wanted = sum(info.size_bytes for info in tensors.values())
    if found != wanted:
        findings.add("index", INDEX_FILE, f"total_size is {found!r}, the tensors take {wanted}")


def check_nothing_added(path: Path, known: Set[str], message: str, findings: Findings) -> None:
    """Add a problem with `message` for each file but `known` ones that an engine may read."""
    try:
        found = [*sidecar_files(path), *weight_files(path)]
    except CheckpointError as error:
        findings.add("sidecars", str(path), str(error))
        return
    for file in sorted(found, key=lambda file: natural_key(str(file))):
        if str(file) not in known and not is_note(file):
            findings.add("sidecars", str(file), message, stray=True)
