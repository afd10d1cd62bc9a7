"""The reference's predictions, kept for the next evaluation.

What the last layer returned is kept, not the logarithms of probabilities that follow from it: H
numbers a token instead of V, from which the reference's head makes all of them again. So nothing is
cut off, and figures are the same as without the file.

It is one safetensors file. `moequant.evaluation` in its metadata is a JSON document: `reference`
identifies checkpoint, data, windows and computation, `batches` says how tensors belong together,
and their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import CheckpointError, MoequantError
from moequant.storage.buffers import tensor_bytes
from moequant.storage.disk import replace_file
from moequant.storage.headers import DTYPES, dtype_name, encode_header, read_header_and_metadata
from moequant.storage.reader import FixedFile
from moequant.storage.setting_differences import difference
from moequant.streaming.activations import join_parts, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from moequant.integrations.layerwise import Activations

_KEY = "moequant.evaluation"
_ADVICE = "name another file, or remove this one to have it written again"


def write_kept(
    path: Path, record: Mapping[str, Any], activations: Callable[[], Iterable[Activations]]
) -> None:
    """Write what the last layer returned for each batch, as a whole or not at all.

    Args:
        path: the file.
        record: what identifies it, a JSON document.
        activations: reads them, one batch after the other; called twice.

    Raises:
        MoequantError: the file cannot be written.
    """
    batches, slots, position = [], [], 0
    for number, found in enumerate(activations()):
        parts = parts_of(found)
        batches.append(
            {
                "tuple": isinstance(found, tuple),
                "parts": [part is not None for part in parts],
                "sha256": _digest(parts),
            }
        )
        for index, tensor in enumerate(parts):
            if tensor is not None:
                stop = position + tensor.nbytes
                name, dtype = _name(number, index), dtype_name(tensor.dtype)
                slots.append((name, dtype, tuple(tensor.shape), position, stop))
                position = stop
    document = json.dumps({"reference": record, "batches": batches})
    header = encode_header(slots, {_KEY: document})

    def chunks() -> Iterator[memoryview]:
        yield memoryview(header)
        for found in activations():
            for tensor in parts_of(found):
                if tensor is not None:
                    yield tensor_bytes(tensor.contiguous())

    replace_file(path, chunks())


class KeptReference:
    """A file that `write_kept` wrote.

    Args:
        path: the file.
        record: what it must be of.

    Raises:
        MoequantError: it is of another reference, data, windows or computation; names the first
            difference. Or it is no such file.
        CheckpointError: it is damaged.
    """

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        self._path = path
        self._file = FixedFile.at(path)
        try:
            self._infos, metadata = read_header_and_metadata(self._file, path.name)
            document = json.loads(metadata[_KEY])
            before, self._batches = document["reference"], document["batches"]
            complete = set(self._infos) == {
                _name(number, index)
                for number, batch in enumerate(self._batches)
                for index, there in enumerate(batch["parts"])
                if there
            } and all(
                isinstance(batch["sha256"], str) and (batch["tuple"] or batch["parts"] == [True])
                for batch in self._batches
            )
        except (CheckpointError, KeyError, TypeError, ValueError):
            complete = False
        if not complete:
            raise MoequantError(f"{path}: not what `moequant evaluate --keep` writes; {_ADVICE}")
        now = json.loads(json.dumps(record))
        if before != now:
            raise MoequantError(
                f"{path}: kept from another reference or other settings: "
                f"{difference(before, now)}; {_ADVICE}"
            )

    def read(self) -> Iterator[Activations]:
        """What the last layer returned for each batch; raises CheckpointError."""
        for number, batch in enumerate(self._batches):
            parts = tuple(
                self._read(_name(number, index)) if there else None
                for index, there in enumerate(batch["parts"])
            )
            found = _digest(parts)
            if found != batch["sha256"]:
                raise CheckpointError(
                    f"{self._path}: batch {number} was damaged: its SHA-256 is {found}, but must "
                    f"be {batch['sha256']}; {_ADVICE}"
                )
            yield join_parts(parts, several=batch["tuple"])

    def _read(self, name: str) -> Tensor:
        info = self._infos[name]
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        self._file.read_into(info.start, tensor_bytes(tensor))
        return tensor


def _digest(parts: Iterable[Tensor | None]) -> str:
    """SHA-256 of the tensors of a batch, in hex."""
    digest = hashlib.sha256()
    for tensor in parts:
        if tensor is not None:
            digest.update(tensor_bytes(tensor.contiguous()))
    return digest.hexdigest()


def _name(batch: int, part: int) -> str:
    return f"batches.{batch}.{part}"
