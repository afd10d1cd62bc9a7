"""The files of a checkpoint's folder: those that hold weights, and those that come along."""

from __future__ import annotations

from pathlib import PurePosixPath
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

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OTHER_WEIGHTS = (
    *PICKLES, ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".tflite", ".gguf", ".npz",
)  # fmt: skip
"""Endings of weight files that are not safetensors."""

_LONGEST_NAME, _LONGEST_PATH = 255, 2048
"""In bytes; what Linux takes, with room for the folder's own path."""

# What a conversion writes itself, at the top of a checkpoint.
_WRITTEN = (CONFIG_FILE, INDEX_FILE, RECORD_FILE, PREPARED_FOLDER)


def check_is_checkpoint(root: Path) -> None:
    """Refuse a folder in which moequant wrote something else: half a checkpoint, prepared tensors.

    Where config.json is there beside a work folder, either the old checkpoint is still whole or the
    new one already is.

    Raises:
        CheckpointError: says how to finish it, or which folder is meant.
    """
    try:
        if (root / CONFIG_FILE).exists():
            return
        begun = (root / WORK_FOLDER).is_dir()
        instead = _meant_instead(root)
    except (OSError, RuntimeError):
        # A folder that may not be looked into, a link to itself; who opens its files says so.
        return
    if instead:
        raise CheckpointError(
            f"{root}: no checkpoint, but what moequant prepare wrote; name {instead}"
        )
    if begun:
        raise CheckpointError(
            f"{root}: an unfinished conversion, interrupted or still at work; once it is "
            "interrupted, the same moequant convert command again finishes it, and keeps what is "
            "done"
        )


def is_prepared_folder(path: Path) -> bool:
    """Whether `path` is a folder that `moequant prepare` wrote."""
    return (path / MANIFEST_FILE).is_file() and not (path / CONFIG_FILE).exists()


def _meant_instead(root: Path) -> str | None:
    """What to name for a prepared folder, or for the folder of several; None for all others."""
    place = root.resolve()
    if place.name == PREPARED_FOLDER:
        prepared = [entry for entry in sorted(root.iterdir()) if is_prepared_folder(entry)]
        if prepared:
            others = " or ".join(map(str, prepared))
            return f"the checkpoint, {place.parent}, or, to inspect or run it, {others}"
    elif place.parent.name == PREPARED_FOLDER and is_prepared_folder(root):
        return f"the checkpoint, {place.parent.parent}"
    return None


def sidecar_files(root: Path) -> list[Path]:
    """Files, relative to `root`, that belong to the model beside config and weights.

    Tokenizer, generation config, chat templates, custom code, licence: everything in it and its
    folders that is not hidden, no weight file and nothing a conversion writes itself.

    Raises:
        CheckpointError: a link leads out of the checkpoint (a hub cache's own blobs aside) or
            nowhere: who converts a folder shall not publish another. Or a name is one that a record
            could not hold; see `is_inner_name`.
    """
    names = [name for name in _walk(root) if not _is_weights(name)]
    for name in names:
        _check_content(root, name)
    return names


def weight_files(root: Path) -> list[Path]:
    """Files, relative to `root`, that hold weights in whatever form, or describe such files."""
    return [name for name in _walk(root) if _is_weights(name)]


def is_adapter(name: Path) -> bool:
    """Whether a file belongs to an adapter, which is loaded beside the weights."""
    return name.name == ADAPTER_CONFIG_FILE or name.name.startswith("adapter_model.")


def is_inner_name(name: str) -> bool:
    """Whether a name that a file speaks of leads nowhere but into its folder, and can be one."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and name.isprintable()
        and "\\" not in name
        and not {"/", "..", "//"} & {*parts}
        and len(name.encode()) < _LONGEST_PATH
        and all(len(part.encode()) <= _LONGEST_NAME for part in parts)
    )


def entries(folder: Path) -> list[Path]:
    """What lies in `folder`, sorted.

    Raises:
        CheckpointError: it cannot be listed.
    """
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be listed: {error.strerror}; see that it is open to you"
        ) from error


def _walk(root: Path, folder: Path | None = None, within: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Every file under `root`, relative to it and sorted, that is neither hidden nor ours.

    Links to folders of the checkpoint are followed, but not into a folder that they lie in.
    """
    folder = folder or root
    within = (*within, folder.resolve())
    for entry in entries(folder):
        name = entry.relative_to(root)
        if entry.name.startswith(".") or str(name) in _WRITTEN:
            continue
        if not entry.is_dir():
            yield name
        elif entry.is_symlink() and not entry.resolve().is_relative_to(within[0]):
            yield name  # It leads out of the checkpoint, and is refused.
        elif entry.resolve() not in within:
            yield from _walk(root, entry, within)


def _is_weights(name: Path) -> bool:
    """Whether a file holds weights, in whatever form, or describes such files."""
    stem = name.name.lower().removesuffix(".index.json")
    return stem == ADAPTER_CONFIG_FILE or stem.endswith((".safetensors", *OTHER_WEIGHTS))


def _check_content(root: Path, name: Path) -> None:
    path, home = root / name, root.resolve()
    if not is_inner_name(str(name)):
        raise CheckpointError(
            f"{root}: holds {str(name)!r}, but names without control characters and backslashes "
            "are wanted; rename or remove it"
        )
    if not path.is_file() and not path.is_dir():
        raise CheckpointError(f"{path}: no file, nor a link to one; remove or replace it")
    homes = [home]
    if home.parent.name == "snapshots":  # the hub's cache: REPO/snapshots/COMMIT, REPO/blobs
        homes.append(home.parent.parent / "blobs")
    target = path.resolve()
    if not any(target.is_relative_to(allowed) for allowed in homes):
        raise CheckpointError(
            f"{path}: leads out of the checkpoint to {target}; put what it leads to there, or "
            "remove the link"
        )
