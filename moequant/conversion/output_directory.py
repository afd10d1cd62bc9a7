"""Check the output directory: whether there is work to do, and whether it may be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.conversion.record import OTHER_QUANTIZATION
from moequant.conversion.settings import differing_settings
from moequant.errors import MoequantError
from moequant.formats import WRITABLE
from moequant.storage.disk import existing_parent
from moequant.storage.documents import object_at, read_document, show_name
from moequant.storage.files import CONFIG_FILE, INDEX_FILE, RECORD_FILE, WORK_FOLDER
from moequant.storage.folder import is_inner_name, read_by_engines
from moequant.storage.reader import FixedFile
from moequant.units import first_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from moequant.conversion.journal import Journal
    from moequant.storage.checkpoint import Checkpoint

_NAMES_SHOWN = 5


def is_work_left(
    journal: Journal,
    plan_sha256: str,
    *,
    settings: Mapping[str, Any],
    state: Callable[[], Mapping[str, Any]],
    source: Callable[[], Mapping[str, Any]],
    overwrite: bool,
) -> bool:
    """Whether there is work to do; False if the same conversion is already finished.

    Args:
        journal: of the output.
        plan_sha256: digest of the plan.
        settings: of the plan; see `settings_of`.
        state: gives the state of the source's files; called only if needed.
        source: computes digests of the source's contents; called only if needed.
        overwrite: whether anything may be replaced.

    Raises:
        MoequantError: the directory contains something else, and `overwrite` is False.
    """
    output = journal.output
    _check_directory(output)
    journal.check_work_folder()
    if overwrite or not output.exists():
        return True
    if journal.exists:
        begun = journal.read_plan()
        if begun["plan_sha256"] == plan_sha256:
            return True
        begun_with = _formats_of(begun).removesuffix(",")
        raise MoequantError(
            f"{output}: holds an unfinished conversion{begun_with}, "
            f"{_difference_of(journal, begun, settings, state)}, interrupted or still running; "
            "repeat its command to finish it or, if that ended with an error about a weight, "
            "replace it with --overwrite (overwrite=True)"
        )
    if all(path.name == WORK_FOLDER for path in output.iterdir()):
        return True
    record = read_record(output)
    recorded = object_at(record, "source")
    if record.get("plan_sha256") != plan_sha256 or not source().items() <= recorded.items():
        raise _refusal_of(output, record, settings)
    _check_whole(output, record)
    return False


def _check_directory(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise MoequantError(f"{output}: is a file; give a directory")
    if output.is_symlink() and not output.exists():
        raise MoequantError(
            f"{output}: a link to {output.readlink()}, which does not exist; create that "
            "directory, or give another"
        )


def _refusal_of(
    output: Path, record: Mapping[str, Any], settings: Mapping[str, Any]
) -> MoequantError:
    """What to say of a directory that holds another conversion, or something else."""
    if not record:
        return MoequantError(
            f"{output}: not empty; holds no readable {RECORD_FILE}; choose another directory, "
            "or move away what is no part of a checkpoint, and replace the rest with "
            "--overwrite (overwrite=True)"
        )
    other = differing_settings(record, settings)
    holds = f"with other settings ({other})" if other else "of another source"
    return MoequantError(
        f"{output}: not empty; holds a conversion{_formats_of(record)} {holds}; choose another "
        "directory, or replace its content with --overwrite (overwrite=True)"
    )


def _difference_of(
    journal: Journal,
    begun: Mapping[str, Any],
    settings: Mapping[str, Any],
    state: Callable[[], Mapping[str, Any]],
) -> str:
    """In what an unfinished conversion of another plan differs, in words.

    Raises:
        MoequantError: in nothing, so that its plan.json has another digest than it was given.
    """
    if other := differing_settings(begun, settings):
        return f"with other settings ({other})"
    before, now = begun["source_state"], state()
    changed = [file for file in {**now, **before} if now.get(file) != before.get(file)]
    if changed:
        return f"of another source (it differs in {changed[0]})"
    raise journal.damaged(
        "its plan_sha256 is not that of its settings and source, unless another moequant wrote it"
    )


def _formats_of(document: Mapping[str, Any]) -> str:
    """Formats and statistics of a record or plan, in words; the document may have been edited."""
    rules = object_at(document, "recipe").get("rules")
    if not isinstance(rules, list):
        return ""
    named = [rule.get("format") for rule in rules if isinstance(rule, dict)]
    formats = [format for format in WRITABLE if format in named]
    into = f" into {' and '.join(formats)}" if formats else ""
    if statistics := object_at(document, "statistics"):
        return f"{into}, with the statistics of header SHA-256 {statistics.get('sha256')!s:.64},"
    return into


def read_record(output: Path) -> dict[str, Any]:
    """moequant.json of a directory; empty if it is missing or unreadable."""
    path = output / RECORD_FILE
    try:
        return read_document(FixedFile.at(path))
    except MoequantError:
        return {}


def recorded_sidecars(record: Mapping[str, Any]) -> list[str]:
    """Names of the sidecar files in a record, which may have been edited."""
    return list(filter(is_inner_name, object_at(object_at(record, "source"), "sidecars")))


def replaced_files(output: Path) -> list[str]:
    """Files that a conversion into an existing output removes; not all of them need be there."""
    shards = [path.name for path in output.glob("*.safetensors")]
    recorded = recorded_sidecars(read_record(output))
    return [CONFIG_FILE, INDEX_FILE, *OTHER_QUANTIZATION, *recorded, *shards, RECORD_FILE]


def check_nothing_stays(output: Path, sidecars: Iterable[str]) -> None:
    """Check that the output, with `sidecars` of the source, keeps no file that engines may read.

    A tokenizer or weights of another model would be loaded with the new weights; removing what no
    conversion wrote is up to the user.

    Raises:
        MoequantError: names files that would stay.
    """
    if not output.is_dir():
        return
    known = {*replaced_files(output), *sidecars}
    staying = [
        name if name.isprintable() else show_name(name)
        for name in map(str, read_by_engines(output))
        if name not in known
    ]
    if staying:
        raise MoequantError(
            f"{output}: holds {first_of(staying, _NAMES_SHOWN)}, which no conversion wrote and "
            "this one does not replace; only notes, pictures and hidden files may stay beside its "
            "weights, because engines may read others: move them away, or choose another output"
        )


def check_apart(source: Checkpoint, output: Path) -> None:
    """Check that neither of source and output contains the other, or a file the source links to."""
    # Not Path.resolve, which fails for a cycle of links.
    one, other = (Path(os.path.realpath(path)) for path in (source.path, output))
    if one == other:
        raise MoequantError(f"{output}: is the source itself; choose another directory")
    if _lies_in(one, other) or _lies_in(other, one):
        raise MoequantError(
            f"{output}: is inside the source {source.path} or contains it; choose another directory"
        )
    # One file per folder, because there may be thousands of files.
    linked = (file.path.resolve() for file in source.files.values() if file.is_local)
    for file in {path.parent: path for path in linked}.values():
        if _lies_in(file, other):
            raise MoequantError(
                f"{output}: holds {file}, which the source {source.path} links to; choose another "
                "directory"
            )


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether `path` is in `folder`, by name or, for double mounts, by device and inode."""
    if path.is_relative_to(folder):
        return True
    wanted = _identity(folder)
    return wanted is not None and wanted in map(_identity, (path, *path.parents))


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if the path does not exist or is not accessible."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_places(output: Path, files: Iterable[str]) -> None:
    """Check that no folder or file blocks the path of an output file; raises MoequantError."""
    for file in files:
        path = output / file
        inner = [parent for parent in path.parents if output in parent.parents]
        in_the_way = (
            [path] if path.is_dir() else [p for p in inner if p.exists() and not p.is_dir()]
        )
        if in_the_way:
            raise MoequantError(
                f"{in_the_way[0]}: in the way of {file}, which this conversion writes; move it "
                "away, or choose another output"
            )


def free_bytes(output: Path) -> int:
    """Free space on the disk of `output`, which need not exist yet."""
    return shutil.disk_usage(existing_parent(output)).free


def check_space(output: Path, needed_bytes: int) -> None:
    """Check that the disk has enough space; `output` need not exist yet; raises MoequantError."""
    free = free_bytes(output)
    if free < needed_bytes:
        raise MoequantError(
            f"{output}: {free:,} bytes free, but {needed_bytes:,} are needed; free space or "
            "choose another disk, then run the command again"
        )


def _check_whole(output: Path, record: Mapping[str, Any]) -> None:
    """Check that no file of a finished output is missing or has another size."""
    shards = record.get("shards")
    sizes = {f: _size_of(entry) for f, entry in shards.items()} if isinstance(shards, dict) else {}
    others = dict.fromkeys((*recorded_sidecars(record), INDEX_FILE, CONFIG_FILE))
    for file, size in {**sizes, **others}.items():
        path = output / file
        if not path.is_file() or size not in (None, path.stat().st_size):
            found = f"{path.stat().st_size} bytes" if path.is_file() else "not there"
            wanted = "the file" if size is None else f"{show(size)} bytes"
            raise MoequantError(
                f"{path}: {found}, but the finished conversion had {wanted} there; convert again "
                "with --overwrite (overwrite=True)"
            )


def _size_of(entry: object) -> int:
    return entry.get("bytes", -1) if isinstance(entry, dict) else -1
