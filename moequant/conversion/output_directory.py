"""What lies in the output directory, and whether to write there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.errors import MoequantError
from moequant.formats import WRITABLE
from moequant.storage.documents import read_document
from moequant.storage.files import CONFIG_FILE, INDEX_FILE, RECORD_FILE, WORK_FOLDER
from moequant.storage.folder import is_inner_name
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from moequant.conversion.journal import Journal
    from moequant.storage.checkpoint import Checkpoint


def is_work_left(
    journal: Journal, plan_sha256: str, source: Callable[[], Mapping[str, Any]], overwrite: bool
) -> bool:
    """Whether there is work to do; False if this very conversion is already finished.

    Args:
        journal: of the output directory.
        plan_sha256: digest of the plan.
        source: digests of the source's contents; asked for only where they decide.
        overwrite: replace what is there.

    Raises:
        MoequantError: the directory holds something else, and `overwrite` was not given.
    """
    output = journal.output
    if output.exists() and not output.is_dir():
        raise MoequantError(f"{output}: is a file; name a directory to write into")
    if output.is_symlink() and not output.exists():
        raise MoequantError(
            f"{output}: a link to {output.readlink()}, where nothing is; make that directory, or "
            "name another"
        )
    journal.check_work_folder()
    if overwrite or not output.exists():
        return True
    if journal.exists:
        begun = journal.read_plan()
        if begun.get("plan_sha256") == plan_sha256:
            return True
        raise MoequantError(
            f"{output}: holds an unfinished conversion{_formats_of(begun)}, with other settings or "
            "of another source, interrupted or still at work; repeat its command to finish it, or "
            "start this one over with --overwrite"
        )
    if all(path.name == WORK_FOLDER for path in output.iterdir()):
        return True
    record = read_record(output)
    if record.get("plan_sha256") != plan_sha256 or not _is_of(record, source()):
        holds = f"one{_formats_of(record)}, of other settings or another source"
        raise MoequantError(
            f"{output}: not empty, and not this conversion of this source, but "
            f"{holds if record else 'nothing with a readable ' + RECORD_FILE}; choose another "
            "directory, or replace what is there with --overwrite"
        )
    _check_whole(output, record)
    return False


def _formats_of(document: Mapping[str, Any]) -> str:
    """What a record or a plan converts into, in words; it may have been edited."""
    recipe = document.get("recipe")
    rules = recipe.get("rules") if isinstance(recipe, dict) else None
    if not isinstance(rules, list):
        return ""
    named = [rule.get("format") for rule in rules if isinstance(rule, dict)]
    formats = [format for format in WRITABLE if format in named]
    return f" into {' and '.join(formats)}" if formats else ""


def read_record(output: Path) -> dict[str, Any]:
    """moequant.json of a directory; empty where it is missing or unreadable."""
    path = output / RECORD_FILE
    try:
        return read_document(FixedFile.at(path))
    except MoequantError:
        return {}


def recorded_sidecars(record: Mapping[str, Any]) -> list[str]:
    """Names of the files that came along into a finished output; a record may have been edited."""
    source = record.get("source")
    sidecars = source.get("sidecars") if isinstance(source, dict) else None
    return list(filter(is_inner_name, sidecars)) if isinstance(sidecars, dict) else []


def check_apart(source: Checkpoint, output: Path) -> None:
    """Refuse an output that lies in the source or around it, or around a file it links to.

    Raises:
        MoequantError: it does.
    """
    # Not Path.resolve, which fails at a loop of links.
    one, other = (Path(os.path.realpath(path)) for path in (source.path, output))
    if _lies_in(one, other) or _lies_in(other, one):
        raise MoequantError(
            f"{output}: lies in the source {source.path} or around it; choose a directory apart "
            "from it"
        )
    # Of each folder one: there may be thousands of files.
    for file in {path.parent: path for path in _linked_to(source)}.values():
        if _lies_in(file, other):
            raise MoequantError(
                f"{output}: holds {file}, which the source {source.path} links to; choose a "
                "directory apart from it"
            )


def _linked_to(source: Checkpoint) -> Iterator[Path]:
    return (file.path.resolve() for file in source.weight_files().values())


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether it does, by name or, where something is mounted twice, as a file of the system."""
    if path.is_relative_to(folder):
        return True
    wanted = _identity(folder)
    return wanted is not None and wanted in map(_identity, (path, *path.parents))


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None of what is not there, or not to be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_places(output: Path, files: Iterable[str]) -> None:
    """Refuse an output in which something stands where a file or its folder must go.

    Raises:
        MoequantError: names it.
    """
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


def check_space(output: Path, needed_bytes: int) -> None:
    """Refuse to begin what the disk cannot hold; `output` need not be there yet.

    Raises:
        MoequantError: says what is free and what is needed.
    """
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < needed_bytes:
        raise MoequantError(
            f"{output}: {free_bytes:,} bytes free, but {needed_bytes:,} are still to be written; "
            "make room or choose another disk, then repeat the command"
        )


def _is_of(record: Mapping[str, Any], source: Mapping[str, Any]) -> bool:
    recorded = record.get("source")
    return isinstance(recorded, dict) and source.items() <= recorded.items()


def _check_whole(output: Path, record: Mapping[str, Any]) -> None:
    """Refuse to call an output finished that lost a file since."""
    shards = record.get("shards")
    sizes = {f: _size_of(entry) for f, entry in shards.items()} if isinstance(shards, dict) else {}
    others = dict.fromkeys((*recorded_sidecars(record), INDEX_FILE, CONFIG_FILE))
    for file, size in {**sizes, **others}.items():
        path = output / file
        if not path.is_file() or size not in (None, path.stat().st_size):
            found = f"{path.stat().st_size} bytes" if path.is_file() else "not there"
            wanted = "the file" if size is None else f"{show(size)} bytes"
            raise MoequantError(
                f"{path}: {found}, but when this conversion was finished {wanted} lay there; "
                "convert again with --overwrite"
            )


def _size_of(entry: object) -> int:
    return entry.get("bytes", -1) if isinstance(entry, dict) else -1
