"""What layers return for every batch, in one file per layer.

The files are written in order, batch after batch, and read in the same order. They stay in the
page cache where there is room, and on the disk where there is not; the process holds one batch.
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from moequant.errors import CheckpointError, MoequantError
from moequant.storage.buffers import tensor_bytes
from moequant.storage.disk import explained, replace_file
from moequant.storage.headers import DTYPES, dtype_name
from moequant.storage.reader import FixedFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from moequant.integrations.layerwise import Activations


class _Batch(BaseModel):
    """What a layer returned for a batch.

    Attributes:
        several: whether it is a tuple.
        tensors: dtype and shape of each; False for None.
    """

    model_config = ConfigDict(extra="forbid")
    several: bool
    tensors: list[Literal[False] | tuple[str, list[int]]]


class _Index(BaseModel):
    """What stands in a file of activations: the batches, and the SHA-256 of the file."""

    model_config = ConfigDict(extra="forbid")
    batches: list[_Batch]
    sha256: str

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        kinds = [kind for batch in self.batches for kind in batch.tensors if kind]
        return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in kinds)


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
        self._batches: list[_Batch] = []
        self._digest = hashlib.sha256()

    def __enter__(self) -> ActivationsWriter:
        with explained(self._path, "created"):
            self._file = self._path.open("wb", buffering=0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, activations: Activations) -> None:
        """Write those of the next batch."""
        kinds: list[Literal[False] | tuple[str, list[int]]] = []
        for tensor in parts_of(activations):
            if tensor is None:
                kinds.append(False)
            else:
                kinds.append((dtype_name(tensor.dtype), list(tensor.shape)))
                view = tensor_bytes(tensor.detach().cpu().contiguous())
                self._digest.update(view)
                with explained(self._path, "written"):
                    while view.nbytes:
                        view = view[self._file.write(view) :]
        self._batches.append(_Batch(several=isinstance(activations, tuple), tensors=kinds))

    def finish(self) -> None:
        """Make all batches durable, with a file beside them that says what they are."""
        with explained(self._path, "synced to disk"):
            os.fsync(self._file.fileno())
        index = _Index(batches=self._batches, sha256=self._digest.hexdigest())
        replace_file(_index(self._path), index.model_dump_json().encode())


def read_activations(path: Path) -> Iterator[Activations]:
    """The activations of each batch, in order, on the CPU.

    The file's digest is compared after the last batch.

    Raises:
        MoequantError: they are not there as a finished `ActivationsWriter` left them.
    """
    index = _read_index(path)
    try:
        digest, file, position = hashlib.sha256(), FixedFile.at(path), 0
        if file.size_bytes != index.size_bytes:
            raise _damaged(path, f"{file.size_bytes} bytes, but {index.size_bytes} were written")
        for batch in index.batches:
            found: list[Tensor | None] = []
            for kind in batch.tensors:
                if not kind:
                    found.append(None)
                    continue
                tensor = torch.empty(kind[1], dtype=DTYPES[kind[0]])
                view = tensor_bytes(tensor)
                file.read_into(position, view)
                digest.update(view)
                position += tensor.nbytes
                found.append(tensor)
            yield join_parts(tuple(found), several=batch.several)
        if digest.hexdigest() != index.sha256:
            raise _damaged(path, "not what was written")
    except CheckpointError as error:
        raise _damaged(path, str(error)) from error


def _read_index(path: Path) -> _Index:
    """The file beside activations; raises MoequantError if it does not describe any."""
    file = _index(path)
    with explained(file, "read"):
        text = file.read_bytes()
    try:
        index = _Index.model_validate_json(text)
    except ValidationError:
        raise _damaged(file, "no index of activations") from None
    for batch in index.batches:
        several = batch.several or (len(batch.tensors) == 1 and batch.tensors[0] is not False)
        sizes = [kind for kind in batch.tensors if kind]
        if not several or any(d not in DTYPES or min(shape, default=0) < 0 for d, shape in sizes):
            raise _damaged(file, "no index of activations")
    return index


def _damaged(path: Path, why: str) -> MoequantError:
    return MoequantError(f"{path}: {why}; it was damaged: remove {path.parent} to start over")


def remove_activations(path: Path) -> None:
    """Remove the activations of a layer, if they are there."""
    with explained(path, "removed"):
        for file in (_index(path), path):
            file.unlink(missing_ok=True)


def _index(path: Path) -> Path:
    return path.with_suffix(".json")
