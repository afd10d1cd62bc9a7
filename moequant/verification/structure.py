"""Names, shapes, dtypes, config and copied files, compared with what is expected."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moequant.conversion import copied_sidecars
from moequant.errors import MoequantError
from moequant.storage.disk import sha256_of
from moequant.storage.files import CONFIG_FILE, INDEX_FILE, RECORD_FILE
from moequant.storage.folder import sidecar_files
from moequant.storage.model_card import CARD_FILE, card_is_of
from moequant.storage.reader import FixedFile
from moequant.verification.differences import differences
from moequant.verification.expectation import LINEAR_ROLES, is_matrix
from moequant.verification.stored import check_nothing_added
from moequant.weights.converted import readers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moequant.conversion import Plan
    from moequant.storage.checkpoint import Checkpoint
    from moequant.verification.expectation import Expectation
    from moequant.verification.findings import Findings
    from moequant.verification.report import Check
    from moequant.verification.stored import StoredCheckpoint

_SHOWN = 16


def check_structure(stored: StoredCheckpoint, expected: Expectation, findings: Findings) -> None:
    """Compare headers, index and config.json with what is expected."""
    _check_tensors(stored, expected, findings)
    if expected.plan is not None:
        _check_plan(stored, expected.plan, findings)
    if stored.has_config:
        config = stored.checkpoint.config
        for place, message in differences(config, expected.config, CONFIG_FILE):
            findings.add("config", place, message)
        if expected.plan is not None:
            _check_formats(config, expected, findings)
    for file, wanted in expected.files.items():
        _check_bytes(stored.checkpoint.path / file, wanted, findings)


def _check_tensors(stored: StoredCheckpoint, expected: Expectation, findings: Findings) -> None:
    """Every tensor that must be there is there as it must be, and no other is."""
    tensors = stored.checkpoint.tensors
    for name, wanted in expected.tensors.items():
        if name in tensors:
            found = tensors[name].dtype, tensors[name].shape
            if found != wanted:
                findings.add("tensors", name, f"{_show(*found)}, expected {_show(*wanted)}")
        # For tensors of an unreadable file, the file was reported.
        elif name not in stored.lost:
            findings.add("tensors", name, f"missing, expected {_show(*wanted)}")
    for name in tensors:
        if name not in expected.tensors and name not in expected.possible:
            findings.add(
                "tensors", name, "neither a tensor of the source nor of a converted weight"
            )


def _check_formats(config: Mapping[str, Any], expected: Expectation, findings: Findings) -> None:
    """config.json gives the actual format of each weight, and says which inputs have scales."""
    formats, roles = expected.formats(), expected.model.roles
    try:
        stated = config.get("quantization_config", {})
        format_of, activations_of = readers(expected.dialect, stated)
        for name, info in expected.original.weights.items():
            if not is_matrix(info) or roles[name].role not in LINEAR_ROLES:
                continue
            module = name.removesuffix(".weight")
            found, wanted = format_of(module), formats.get(module)
            scheme = activations_of(module)
            if scheme != expected.activations.get(module):
                says = "no static scale" if scheme is None else f"{scheme} activations"
                has = "one" if scheme is None else "none"
                findings.add("config", name, f"{CONFIG_FILE} says {says}, but it has {has}")
            if found != wanted:
                findings.add(
                    "config",
                    name,
                    f"{CONFIG_FILE} says {found or 'not converted'}, but it is {wanted or 'kept'}",
                )
    except MoequantError as error:
        findings.add("config", CONFIG_FILE, str(error))


def check_shards(path: Path, record: Mapping[str, Any], findings: Findings) -> None:
    """Sizes and digests of the shards are those moequant.json records."""
    shards = record.get("shards")
    if not isinstance(shards, dict):
        findings.add("record", RECORD_FILE, "shards is not an object of digests by file")
        return
    present = {file.name for file in path.glob("*.safetensors")}
    for file, wanted in shards.items():
        if file not in present:
            findings.add("record", file, f"missing, but {RECORD_FILE} records it")
        # A pipe or a folder was reported when headers were read.
        elif (path / file).is_file():
            found = {"bytes": (path / file).stat().st_size, "sha256": sha256_of(path / file)}
            for place, message in differences(found, wanted, file):
                findings.add("record", place, f"{message}, according to {RECORD_FILE}")
    for file in sorted(present - shards.keys()):
        findings.add("record", file, f"not recorded in {RECORD_FILE}")


def _check_plan(stored: StoredCheckpoint, plan: Plan, findings: Findings) -> None:
    """Shards, their headers and the index are the plan's.

    Files that cannot be read, and an index that contradicts them, were named when they were read.
    """
    headers = {shard.file: shard.header for shard in plan.shards}
    for name, file in stored.checkpoint.files.items():
        if name not in headers:
            findings.add("files", name, "not a shard of what the recorded recipe makes")
        elif file.read(0, min(len(headers[name]), file.size_bytes)) != headers[name]:
            findings.add("files", name, "its header is not the one the recorded recipe makes")
    if not findings.has("index"):
        for place, message in differences(stored.index, plan.index(), INDEX_FILE):
            findings.add("index", place, message)


def _check_bytes(path: Path, wanted: bytes, findings: Findings) -> None:
    """A file is the plan's to the byte.

    A file that is missing or unreadable, or that has other values, was named with them.
    """
    check: Check = "config" if path.name == CONFIG_FILE else "index"
    if findings.has(check):
        return
    file = FixedFile.at(path)
    found = bytes(file.read(0, file.size_bytes))
    if found != wanted:
        i = _first_difference(found, wanted)
        findings.add(
            check,
            path.name,
            f"has the right values, but not the bytes that moequant writes: {_shown(found, i)} at "
            f"byte {i}, expected {_shown(wanted, i)}; convert again, or put the file back",
        )


def _first_difference(found: bytes, wanted: bytes) -> int:
    """Index of the first byte that differs; where one is longer, the length of the other."""
    pairs = enumerate(zip(found, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(found), len(wanted)))


def _shown(data: bytes, i: int) -> str:
    """A few bytes from the i-th on, as text."""
    return repr(data[i : i + _SHOWN].decode(errors="replace")) if i < len(data) else "the end"


def check_sidecars(
    source: Checkpoint, path: Path, findings: Findings, *, by_moequant: bool
) -> None:
    """Tokenizer and other files were copied bit for bit, and no older quantization's config."""
    copied_files, sidecars = copied_sidecars(source), sidecar_files(source.path)
    for file in sidecars:
        # A model card speaks of one checkpoint; other tools write their own.
        if not by_moequant and file == Path(CARD_FILE):
            continue
        copied = (path / file).is_file()
        same = copied and filecmp.cmp(source.path / file, path / file, shallow=False)
        if copied and not same and file == Path(CARD_FILE):
            same = card_is_of(path / file, sha256_of(source.path / file))
        if file not in copied_files:
            if same:
                message = "describes the source's quantization; remove it"
                findings.add("sidecars", str(file), message, stray=True)
        elif not copied:
            findings.add("sidecars", str(file), "missing; the source has it")
        elif not same:
            findings.add("sidecars", str(file), "not the source's bytes")
    # No file may be added that an engine would read: code, templates, other weights.
    if by_moequant:
        known = {*sidecars, *(p.relative_to(path) for p in path.glob("*.safetensors"))}
        message = "not from the source; engines may read it: remove it"
        check_nothing_added(path, set(map(str, known)), message, findings)


def _show(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
