"""Write a file of statistics layer by layer; it is no valid file until the end.

Every tensor has its place before there is data: the record's digests, which come last, always have
the same length. Until `finish`, where the header belongs there are zeros, which no reader accepts,
and the file has another name. So a run that is killed leaves nothing that looks whole, and the next
one continues in the same file.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import torch

from moequant.errors import MoequantError, StatisticsError
from moequant.statistics.record import METADATA_KEY, digest_names, moments_digest
from moequant.statistics.tensors import all_specs, layer_specs, moment_specs
from moequant.storage.buffers import tensor_bytes
from moequant.storage.disk import explained, fsync_directory, write_all
from moequant.storage.headers import DTYPES
from moequant.storage.output_file import reserve
from moequant.storage.writer import lay_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from moequant.statistics.record import StatisticsRecord
    from moequant.statistics.tensors import TensorSpec
    from moequant.storage.headers import TensorInfo

_CHUNK_BYTES = 8 << 20
_PENDING = "0" * 64


class StatisticsWriter:
    """A file of statistics that is being written; close it, or use it in a `with` statement.

    Args:
        path: the name while it is unfinished.
        record: all but the digests.
        finished: digests of what an earlier run has written, which is checked and kept; without
            any, an existing file is written anew.

    Raises:
        MoequantError: the file cannot be written, or does not hold what is finished.
    """

    def __init__(
        self, path: Path, record: StatisticsRecord, finished: Mapping[str, str] | None = None
    ) -> None:
        names = digest_names(record.layers, hessian=record.hessian)
        self.record = record.model_copy(update={"digests": dict.fromkeys(names, _PENDING)})
        self.path = path
        header, self._slots = self._lay_out(self.record)
        self._header_bytes = len(header)
        self.size_bytes = max(slot.stop for slot in self._slots.values())
        with explained(path, "opened" if finished else "created"):
            # A file that should be there, and is not, must not come into being here.
            self._fd = os.open(path, os.O_RDWR | (0 if finished else os.O_CREAT), 0o666)
        try:
            if finished:
                self._check(finished)
            else:
                with explained(path, f"given its {self.size_bytes} bytes"):
                    os.ftruncate(self._fd, 0)
                    reserve(self._fd, self.size_bytes)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> StatisticsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was written stays."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def write_layer(self, layer: int, tensors: Mapping[str, Tensor]) -> str:
        """Write the tensors of `LayerSums.to_tensors`, durably; returns their digest.

        Raises:
            StatisticsError: a value is NaN or Inf.
            MoequantError: they cannot be written.
        """
        digest = hashlib.sha256()
        for name, _, _ in layer_specs(self.record, layer):
            slot, tensor = self._slots[name], tensors[name]
            assert (DTYPES[slot.dtype], slot.shape) == (tensor.dtype, tuple(tensor.shape)), name
            if not torch.isfinite(tensor).all():
                raise StatisticsError(
                    f"{name}: holds NaN or Inf; the model computes them from this data in layer "
                    f"{layer} or before. Check the checkpoint, or compute with --dtype float32"
                )
            view = tensor_bytes(tensor.contiguous())
            digest.update(view)
            self._write(slot.start, view)
        self._sync()
        return digest.hexdigest()

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Rows of a tensor's first dimension, as written so far; zeros in a new file."""
        slot = self._slots[name]
        count = rows.stop - rows.start
        tensor = torch.empty((count, *slot.shape[1:]), dtype=DTYPES[slot.dtype])
        view = tensor_bytes(tensor)
        self._read(slot.start + rows.start * (view.nbytes // count), view)
        return tensor

    def write_rows(self, name: str, first: int, tensor: Tensor) -> None:
        """Write rows of a tensor's first dimension, from row `first` on."""
        slot, view = self._slots[name], tensor_bytes(tensor)
        self._write(slot.start + first * (view.nbytes // len(tensor)), view)

    def digest_moments(self, layer: int) -> str:
        """Make the second moments of a layer durable; returns their digest."""
        self._sync()
        return self._digest(moment_specs(self.record, layer))

    def finish(self, target: Path, digests: Mapping[str, str]) -> None:
        """Write the header with the digests of all layers, close, and rename the file to `target`.

        Raises:
            MoequantError: it cannot be written or renamed.
        """
        ordered = {name: digests[name] for name in self.record.digests}
        record = self.record.model_copy(update={"digests": ordered})
        header, _ = self._lay_out(record)
        assert len(header) == self._header_bytes, (len(header), self._header_bytes)
        self._write(0, memoryview(header))
        self._sync()
        self.close()
        with explained(target, "written"):
            self.path.replace(target)
        fsync_directory(target.parent)

    def _check(self, finished: Mapping[str, str]) -> None:
        """Compare what is in the file with its digests."""
        size_bytes = os.fstat(self._fd).st_size
        fault = None
        if size_bytes != self.size_bytes:
            fault = f"{size_bytes} bytes, but {self.size_bytes} were written"
        for layer in self.record.layers:
            for name, specs in (
                (str(layer), layer_specs),
                (moments_digest(layer), moment_specs),
            ):
                if fault is None and name in finished:
                    found = self._digest(specs(self.record, layer))
                    if found != finished[name]:
                        fault = f"layer {layer} has SHA-256 {found}, but had {finished[name]}"
        if fault is not None:
            raise MoequantError(
                f"{self.path}: {fault}; it was damaged: remove {self.path.parent} to start over"
            )

    def _digest(self, specs: Iterable[TensorSpec]) -> str:
        digest = hashlib.sha256()
        for name, _, _ in specs:
            slot = self._slots[name]
            for start in range(slot.start, slot.stop, _CHUNK_BYTES):
                chunk = memoryview(bytearray(min(_CHUNK_BYTES, slot.stop - start)))
                self._read(start, chunk)
                digest.update(chunk)
        return digest.hexdigest()

    def _lay_out(self, record: StatisticsRecord) -> tuple[bytes, dict[str, TensorInfo]]:
        return lay_out(all_specs(record), {METADATA_KEY: record.model_dump_json()})

    def _read(self, position: int, view: memoryview) -> None:
        with explained(self.path, "read"):
            while view.nbytes:
                done = os.preadv(self._fd, [view], position)
                if done == 0:
                    raise MoequantError(f"{self.path}: ends before byte {position}; run again")
                view, position = view[done:], position + done

    def _write(self, position: int, view: memoryview) -> None:
        with explained(self.path, "written"):
            write_all(self._fd, position, view)

    def _sync(self) -> None:
        with explained(self.path, "synced to disk"):
            os.fsync(self._fd)
