"""The files in a checkpoint's folder: weight files and sidecar files."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError
from moequant.storage.files import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    PREPARED_FOLDER,
    RECORD_FILE,
    WORK_FOLDER,
)
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import PurePath

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_WEIGHTS = (
    *PICKLES, ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".tflite", ".gguf", ".npz",
)  # fmt: skip
"""Suffixes of weight files other than safetensors."""

NOTES = (".md", ".png", ".jpg", ".svg", ".html")
"""Suffixes, in lower case, of files that may be added to a checkpoint: no engine reads them."""

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 2048
"""Linux's limits, with room for the folder's own path."""

INNER_NAME_RULE = (
    f"have at most {_MAX_NAME_BYTES} bytes between slashes, fewer than {_MAX_PATH_BYTES} in all, "
    "and no control characters, backslashes or .."
)
"""What `is_inner_name` wants, for messages."""

UNFINISHED = (
    "an unfinished conversion, interrupted or still running; if it was interrupted, run the same "
    "moequant convert command again to finish it; if it ended with an error about a weight, do "
    "what the error said, because it would end there again"
)
"""What messages say of a work folder."""

# Files that a conversion writes itself, at the top level of a checkpoint.
_WRITTEN = (CONFIG_FILE, INDEX_FILE, RECORD_FILE, PREPARED_FOLDER)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The folder of a checkpoint. `HubFolder` is one that is not on disk, or not completely.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def shown(self) -> Path:
        """How messages call it."""
        return self.path

    @property
    def absent(self) -> str:
        """What messages advise about a file that is not there."""
        return "Fetch them again"

    @property
    def without_weights(self) -> str:
        """What messages advise if there is no weight file."""
        return "fetch the weights"

    def check(self) -> None:
        """Refuse a folder that is no checkpoint; see `check_is_checkpoint`."""
        check_is_checkpoint(self.path)

    def names(self) -> list[str]:
        """Names of its files and folders, sorted, without what these contain."""
        return [entry.name for entry in entries(self.path)]

    def open(self, file: str) -> FixedFile:
        """A file by its relative path; raises CheckpointError."""
        return FixedFile.at(self.path / file)

    def open_weights(self, files: Iterable[str]) -> Mapping[str, FixedFile]:
        """Weight files, whose headers will be read; raises CheckpointError."""
        return {file: self.open(file) for file in files}

    def sidecar_files(self) -> list[Path]:
        """See the function of this name."""
        return sidecar_files(self.path)

    def weight_files(self) -> list[Path]:
        """See the function of this name."""
        return weight_files(self.path)


def check_is_checkpoint(root: Path) -> None:
    """Refuse an unfinished conversion and a prepared folder.

    If there is a config.json next to a work folder, either the old checkpoint is still complete, or
    the new one already is.

    Raises:
        CheckpointError: the message says how to finish it, or which folder to give instead.
    """
    try:
        if (root / CONFIG_FILE).exists():
            return
        begun = (root / WORK_FOLDER).is_dir()
        instead = _meant_instead(root)
    except (OSError, RuntimeError):
        # No permission, or a link to itself; opening its files raises the error.
        return
    if instead:
        raise CheckpointError(
            f"{root}: not a checkpoint, but a folder that moequant prepare wrote; give {instead}"
        )
    if begun:
        raise CheckpointError(f"{root}: {UNFINISHED}")


def is_prepared_folder(path: Path) -> bool:
    """Whether `path` is a folder that `moequant prepare` wrote.

    Raises:
        CheckpointError: the folder cannot be searched.
    """
    with searched(path):
        return _has_manifest(path)


def _has_manifest(path: Path) -> bool:
    """As `is_prepared_folder`; raises OSError."""
    return (path / MANIFEST_FILE).is_file() and not (path / CONFIG_FILE).exists()


@contextmanager
def searched(path: Path) -> Iterator[None]:
    """Turn an OSError of a look into `path` into a CheckpointError with advice."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be searched: {error.strerror}; check its permissions, and those of "
            "the folders it is in"
        ) from error


def _meant_instead(root: Path) -> str | None:
    """What to give instead of a prepared folder, or of their parent; None for other folders."""
    place = root.resolve()
    if place.name == PREPARED_FOLDER:
        prepared = [entry for entry in sorted(root.iterdir()) if _has_manifest(entry)]
        if prepared:
            others = " or ".join(map(str, prepared))
            return f"the checkpoint, {place.parent}, or, to inspect or run it, {others}"
    elif place.parent.name == PREPARED_FOLDER and _has_manifest(root):
        return f"the checkpoint, {place.parent.parent}"
    return None


def sidecar_files(root: Path) -> list[Path]:
    """Files of the model, relative to `root`, other than config.json and weights.

    Tokenizer, generation config, chat templates, custom code, licence: all files, also in
    subfolders, that are not hidden, not weights, and not written by a conversion.

    Raises:
        CheckpointError: a link leads out of the checkpoint (except into a hub cache's blobs) or
            nowhere, so that a conversion cannot publish other folders' files; or a name is not
            allowed in a record (see `is_inner_name`).
    """
    names = [name for name in _walk(root) if not is_weights(name)]
    for name in names:
        _check_content(root, name)
    return names


def weight_files(root: Path) -> list[Path]:
    """Weight files of any format, and files that describe them, relative to `root`."""
    return [name for name in _walk(root) if is_weights(name)]


def read_by_engines(root: Path) -> list[Path]:
    """Files relative to `root` that engines may read, except those only a conversion writes.

    Unlike `sidecar_files`, it looks at names only, and accepts any.

    Raises:
        CheckpointError: a folder cannot be listed.
    """
    return [name for name in _walk(root) if not is_note(name)]


def is_note(file: PurePath) -> bool:
    """Whether a file may be added to a checkpoint."""
    return file.suffix.lower() in NOTES


def is_adapter(name: Path) -> bool:
    """Whether a file belongs to an adapter, which is loaded with the weights."""
    return name.name == ADAPTER_CONFIG_FILE or name.name.startswith("adapter_model.")


def is_inner_name(name: str) -> bool:
    """Whether a name from a file is a valid path that stays inside the folder."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and name.isprintable()
        and "\\" not in name
        and not {"/", "..", "//"} & {*parts}
        and len(name.encode()) < _MAX_PATH_BYTES
        and all(len(part.encode()) <= _MAX_NAME_BYTES for part in parts)
    )


def entries(folder: Path) -> list[Path]:
    """The entries of `folder`, sorted; raises CheckpointError."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be listed: {error.strerror}; check its permissions"
        ) from error


def _walk(root: Path, folder: Path | None = None, within: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All files under `root`, relative and sorted, that are not hidden or written by a conversion.

    Links to folders of the checkpoint are followed, except to a parent of the link.
    """
    folder = folder or root
    within = (*within, folder.resolve())
    for entry in entries(folder):
        name = entry.relative_to(root)
        if is_left_out(name):
            continue
        if not entry.is_dir():
            yield name
        elif entry.is_symlink() and not entry.resolve().is_relative_to(within[0]):
            yield name  # leads out of the checkpoint, and will be refused
        elif entry.resolve() not in within:
            yield from _walk(root, entry, within)


def is_left_out(name: PurePath) -> bool:
    """Whether a file, or a folder, is hidden, or a conversion writes it itself."""
    return name.name.startswith(".") or str(name) in _WRITTEN


def is_weights(name: PurePath) -> bool:
    """Whether a file holds weights of any format, or describes such files."""
    stem = name.name.lower().removesuffix(".index.json")
    return stem == ADAPTER_CONFIG_FILE or stem.endswith((".safetensors", *OTHER_WEIGHTS))


def _check_content(root: Path, name: Path) -> None:
    path, home = root / name, root.resolve()
    if not is_inner_name(str(name)):
        raise CheckpointError(
            f"{root}: holds {str(name)!r}, but names must {INNER_NAME_RULE}; rename or remove it"
        )
    if not path.is_file() and not path.is_dir():
        raise CheckpointError(f"{path}: neither a file nor a link to one; remove or replace it")
    homes = [home]
    if home.parent.name == "snapshots":  # the hub's cache: REPO/snapshots/COMMIT, REPO/blobs
        homes.append(home.parent.parent / "blobs")
    target = path.resolve()
    if not any(target.is_relative_to(allowed) for allowed in homes):
        raise CheckpointError(
            f"{path}: leads out of the checkpoint to {target}; put what it leads to there, or "
            "remove the link"
        )
