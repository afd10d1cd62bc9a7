"""What layers return for every batch, in one file per layer.

The files are written in order, batch after batch, and read in the same order. They stay in the
page cache where there is room, and on the disk where there is not; the process holds one batch.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import MoequantError
from moequant.storage.buffers import tensor_bytes
from moequant.storage.disk import explained, replace_file
from moequant.storage.headers import DTYPES, dtype_name
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from moequant.integrations.layerwise import Activations


def parts_of(activations: Activations) -> tuple[Tensor | None, ...]:
    """The tensors of activations, of which a layer may return several, and None among them."""
    return activations if isinstance(activations, tuple) else (activations,)


def join_parts(parts: tuple[Tensor | None, ...], *, several: bool) -> Activations:
    """The inverse of `parts_of`, where `several` says whether it was given a tuple."""
    if several:
        return parts
    (only,) = parts
    assert only is not None, "a tensor alone is never None"
    return only


class ActivationsWriter:
    """Writes the activations of one layer, for `with` statements; `finish` makes them durable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._batches: list[dict[str, Any]] = []

    def __enter__(self) -> ActivationsWriter:
        with explained(self._path, "created"):
            self._file = self._path.open("wb", buffering=0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, activations: Activations) -> None:
        """Write those of the next batch."""
        kinds = []
        for tensor in parts_of(activations):
            kinds.append(tensor is not None and [dtype_name(tensor.dtype), list(tensor.shape)])
            if tensor is not None:
                view = tensor_bytes(tensor.detach().cpu().contiguous())
                with explained(self._path, "written"):
                    while view.nbytes:
                        view = view[self._file.write(view) :]
        self._batches.append({"tuple": isinstance(activations, tuple), "tensors": kinds})

    def finish(self) -> None:
        """Make all batches durable, with a file beside them that says what they are."""
        with explained(self._path, "synced to disk"):
            os.fsync(self._file.fileno())
        replace_file(_index(self._path), json.dumps(self._batches).encode())


def read_activations(path: Path) -> Iterator[Activations]:
    """The activations of each batch, in order, on the CPU.

    Raises:
        MoequantError: they are not there as a finished `ActivationsWriter` left them.
        CheckpointError: the file cannot be read.
    """
    with explained(_index(path), "read"):
        batches = json.loads(_index(path).read_text())
    file, position = FixedFile.at(path), 0
    for batch in batches:
        found: list[Tensor | None] = []
        for kind in batch["tensors"]:
            if not kind:
                found.append(None)
                continue
            tensor = torch.empty(kind[1], dtype=DTYPES[kind[0]])
            file.read_into(position, tensor_bytes(tensor))
            position += tensor.nbytes
            found.append(tensor)
        yield join_parts(tuple(found), several=batch["tuple"])
    if position != file.size_bytes:
        raise MoequantError(
            f"{path}: {file.size_bytes} bytes, but its index describes {position}; remove "
            f"{path.parent} to start over"
        )


def remove_activations(path: Path) -> None:
    """Remove the activations of a layer, if they are there."""
    with explained(path, "removed"):
        for file in (_index(path), path):
            file.unlink(missing_ok=True)


def _index(path: Path) -> Path:
    return path.with_suffix(".json")
