"""Read a file of calibration statistics, layer by layer."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from moequant.errors import CheckpointError, StatisticsError
from moequant.statistics.inputs import HIDDEN, input_of
from moequant.statistics.record import METADATA_KEY, StatisticsRecord, moments_digest
from moequant.statistics.shrinkage import shrink
from moequant.statistics.tensors import (
    all_specs,
    layer_specs,
    moment_specs,
    pooled_second_moment,
    second_moment,
)
from moequant.storage.buffers import tensor_bytes
from moequant.storage.given_path import given_path
from moequant.storage.headers import DTYPES, LENGTH_BYTES, read_header_and_metadata
from moequant.storage.reader import FixedFile
from moequant.storage.schema_errors import first_fault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from moequant.models import Model
    from moequant.storage.headers import TensorInfo

_KEPT_LAYERS = 2
"""Layers without second moments that are kept in memory: workers are seldom further apart."""
_CHUNK_BYTES = 8 << 20
_COMPARING = threading.Lock()
"""Held while second moments are compared with their digest."""
_REMEDY = "run `moequant calibrate` again"


class Statistics:
    """A file that `moequant calibrate` wrote.

    Opening reads the header. The tensors of a layer are read, and compared with their digest, when
    the first of them is needed. An object may be used from several threads, and pickled.

    Values are shrunk toward those of the layer (`moequant.statistics.shrinkage`) unless `measured`
    is True; then they are 0 for an expert without tokens. Statistics of gate and of up are the
    same, because both multiply the hidden states.

    Attributes:
        path: the file.
        record: what it says about itself.
        digest: SHA-256 of its header in hex, which holds the digests of all tensors: it identifies
            the statistics.
    """

    def __init__(
        self,
        file: FixedFile,
        record: StatisticsRecord,
        digest: str,
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.path = file.path
        self.record = record
        self.digest = digest
        self._file = file
        self._tensors = tensors
        self._layers: dict[int, dict[str, Tensor]] = {}
        self._compared: set[int] = set()

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Open a file of statistics.

        Raises:
            StatisticsError: there is no such file, it is incomplete or damaged, or it holds
                something else.
            UnsupportedError: `path` is neither a text nor a path.
        """
        path = given_path("statistics", path, what="a file of statistics", error=StatisticsError)
        try:
            file = FixedFile.at(path)
        except CheckpointError as error:
            raise StatisticsError(
                f"{error}; statistics are what `moequant calibrate` writes"
            ) from error
        try:
            tensors, metadata = read_header_and_metadata(file, path.name)
            length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
            header = file.read(0, LENGTH_BYTES + length)
        except CheckpointError as error:
            # The error's own advice is about checkpoints.
            reason = str(error).rpartition(";")[0] or error
            raise StatisticsError(
                f"{reason}; no file of statistics, or a damaged one: give the file that "
                "`moequant calibrate` wrote"
            ) from error
        record = _read_record(path, metadata)
        found = {name: (info.dtype, info.shape) for name, info in tensors.items()}
        expected = {name: (dtype, shape) for name, dtype, shape in all_specs(record)}
        if found != expected:
            different = sorted(n for n in found | expected if found.get(n) != expected.get(n))
            raise StatisticsError(
                f"{path}: tensor {different[0]!r} is {found.get(different[0], 'missing')}, but by "
                f"the file's record {expected.get(different[0], 'none')}; {_REMEDY}"
            )
        return cls(file, record, hashlib.sha256(header).hexdigest(), tensors)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        return self.record.layers

    @property
    def kept_bytes(self) -> int:
        """Upper bound of the memory for the layers that are kept, without second moments."""
        record = self.record
        return _KEPT_LAYERS * 4 * (record.experts + 1) * (record.hidden + record.intermediate + 4)

    @property
    def has_hessian(self) -> bool:
        """Whether `hessian` has what it needs."""
        return self.record.hessian

    def tokens(self, layer: int, expert: int) -> int:
        """How many tokens the expert saw; raises as `input_mean_square`."""
        self._check(layer, expert)
        return int(self._layer(layer)[f"layers.{layer}.tokens"][expert])

    def coverage(self, layer: int) -> dict[str, Any]:
        """What the experts of a layer saw, and whose statistics are mostly the layer's.

        Returns:
            `layer`; `tokens` of each expert; `unrouted`, the experts without any, and
            `mostly_pooled`, those with fewer than `prior_tokens`; the largest magnitudes of both
            inputs.

        Raises:
            StatisticsError: as `tokens`.
        """
        seen = [self.tokens(layer, expert) for expert in range(self.record.experts)]
        return {
            "layer": layer,
            "tokens": seen,
            "unrouted": [e for e, tokens in enumerate(seen) if not tokens],
            "mostly_pooled": [
                e for e, tokens in enumerate(seen) if 0 < tokens < self.record.prior_tokens
            ],
            "hidden_amax": self.amax_of_layer(layer, "up"),
            "intermediate_amax": self.amax_of_layer(layer, "down"),
        }

    def input_mean_square(
        self, layer: int, expert: int, projection: str, *, measured: bool = False
    ) -> Tensor:
        """The mean of x * x over tokens, of each channel of what a projection multiplies.

        Args:
            layer: index of the layer, one of `layers`.
            expert: index of the expert.
            projection: gate, up or down.
            measured: without shrinking.

        Returns:
            [K] float32, K the columns of the weight [N, K].

        Raises:
            StatisticsError: the file was damaged or changed after it was opened, or has no such
                layer or expert.
        """
        self._check(layer, expert)
        tensors, prefix = self._layer(layer), f"layers.{layer}.{input_of(projection)}"
        own = tensors[f"{prefix}.mean_square"][expert]
        if measured:
            return own.clone()
        return self._shrunk(layer, expert, own, tensors[f"{prefix}.pooled_mean_square"])

    def amax(self, layer: int, expert: int, projection: str, *, measured: bool = False) -> float:
        """The largest magnitude of what a projection multiplies; as `input_mean_square`."""
        self._check(layer, expert)
        found = self._layer(layer)[f"layers.{layer}.{input_of(projection)}.amax"]
        if measured:
            return float(found[expert])
        return float(self._shrunk(layer, expert, found[expert], found.max()))

    def amax_of_layer(self, layer: int, projection: str) -> float:
        """The largest magnitude that a projection of any expert multiplies."""
        self._check(layer, 0)
        return float(self._layer(layer)[f"layers.{layer}.{input_of(projection)}.amax"].max())

    def hessian(
        self, layer: int, expert: int, projection: str, *, measured: bool = False
    ) -> Tensor:
        """The mean of x xT over tokens, for GPTQ; its diagonal is nearly `input_mean_square`.

        The two are summed in another order, so that their last bits differ. It is read from the
        file in each call, and compared with no digest: see `check_hessians`.

        Args:
            layer: as for `input_mean_square`.
            expert: likewise.
            projection: likewise.
            measured: likewise.

        Returns:
            [K, K] float32, symmetric.

        Raises:
            StatisticsError: as `input_mean_square`, or the file has no second moments.
        """
        self._check(layer, expert)
        self._check_has_hessian()
        name = input_of(projection)
        own = self._read(second_moment(layer, name), expert)
        if measured:
            return own
        if name == HIDDEN:
            pooled = self._read(pooled_second_moment(layer))
        else:
            square = self._layer(layer)[f"layers.{layer}.{name}.pooled_mean_square"]
            pooled = torch.diag(square)
        return self._shrunk(layer, expert, own, pooled)

    def check_hessians(self, layer: int) -> None:
        """Compare the second moments of a layer with their digest, once, which reads all of them.

        Raises:
            StatisticsError: they are not those that were written, or there are none.
        """
        self._check(layer, 0)
        self._check_has_hessian()
        # Workers reach a layer together, and one of them is to read it.
        with _COMPARING:
            if layer in self._compared:
                return
            digest = hashlib.sha256()
            for name, _, _ in moment_specs(self.record, layer):
                info = self._tensors[name]
                try:
                    for chunk in self._file.chunks(info.start, info.stop, _CHUNK_BYTES):
                        digest.update(chunk)
                except CheckpointError as error:
                    raise StatisticsError(str(error)) from error
            self._compare(digest.hexdigest(), moments_digest(layer))
            self._compared.add(layer)

    def check_fits(self, model: Model) -> None:
        """Check that the statistics are of a model of this architecture and these sizes.

        Raises:
            StatisticsError: they are of another; names what differs.
        """
        moe, record = model.moe, self.record
        pairs = {
            "architecture": (record.architecture, model.architecture.name),
            "experts": (record.experts, moe.experts),
            "hidden size": (record.hidden, moe.hidden),
            "intermediate size": (record.intermediate, moe.intermediate),
        }
        for what, (found, wanted) in pairs.items():
            if found != wanted:
                raise StatisticsError(
                    f"{self.path}: of a model with {what} {found}, but this one has {wanted}; "
                    "calibrate this model"
                )
        missing = [layer for layer in moe.sparse_layers if layer not in record.layers]
        if missing:
            raise StatisticsError(
                f"{self.path}: nothing of layer {missing[0]}, which has experts; calibrate this "
                "model"
            )

    def check_measured_on(self, source: Mapping[str, Any]) -> None:
        """Check that the statistics were measured on this checkpoint.

        Args:
            source: digests of a checkpoint, as in moequant.json: `config_sha256` and
                `sample_sha256`. Tokenizer and templates do not change what weights multiply.

        Raises:
            StatisticsError: they were measured on another.
        """
        for key, what in (("sample_sha256", "weights"), ("config_sha256", "config.json")):
            if self.record.source.get(key) != source[key]:
                raise StatisticsError(
                    f"{self.path}: measured on a checkpoint with other {what} ({key} "
                    f"{self.record.source.get(key)}, but here {source[key]}); run `moequant "
                    "calibrate` on this checkpoint"
                )

    def _check(self, layer: int, expert: int) -> None:
        if layer not in self.record.layers:
            raise StatisticsError(
                f"{self.path}: nothing of layer {layer}, only of {len(self.layers)} layers from "
                f"{self.layers[0]} to {self.layers[-1]}; calibrate the model that has it"
            )
        if not 0 <= expert < self.record.experts:
            raise StatisticsError(
                f"{self.path}: nothing of expert {expert}, only of experts 0 to "
                f"{self.record.experts - 1}; calibrate the model that has it"
            )

    def _check_has_hessian(self) -> None:
        if not self.record.hessian:
            raise StatisticsError(
                f"{self.path}: without Hessians; run `moequant calibrate --hessian`"
            )

    def _shrunk(self, layer: int, expert: int, own: Tensor, pooled: Tensor) -> Tensor:
        tokens = self.tokens(layer, expert)
        return shrink(own, pooled, tokens=tokens, prior_tokens=self.record.prior_tokens)

    def _layer(self, layer: int) -> Mapping[str, Tensor]:
        """The tensors of a layer without second moments, by name."""
        if (kept := self._layers.get(layer)) is not None:
            return kept
        digest, tensors = hashlib.sha256(), {}
        for name, _, _ in layer_specs(self.record, layer):
            tensors[name] = self._read(name)
            digest.update(tensor_bytes(tensors[name]))
        self._compare(digest.hexdigest(), str(layer))
        for old in [*self._layers][: 1 - _KEPT_LAYERS]:
            self._layers.pop(old, None)  # another thread may have removed it
        self._layers[layer] = tensors
        return tensors

    def _compare(self, found: str, name: str) -> None:
        if found != self.record.digests[name]:
            raise StatisticsError(
                f"{self.path}: layer {name.partition('.')[0]} was damaged: its SHA-256 is {found}, "
                f"but must be {self.record.digests[name]}; copy the file again, or {_REMEDY}"
            )

    def _read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of its first dimension."""
        info = self._tensors[name]
        shape = info.shape if row is None else info.shape[1:]
        tensor = torch.empty(shape, dtype=DTYPES[info.dtype])
        view = tensor_bytes(tensor)
        try:
            self._file.read_into(info.start + (row or 0) * view.nbytes, view)
        except CheckpointError as error:
            raise StatisticsError(str(error)) from error
        return tensor


def _read_record(path: Path, metadata: Mapping[str, str]) -> StatisticsRecord:
    if METADATA_KEY not in metadata:
        raise StatisticsError(
            f"{path}: no {METADATA_KEY} in its metadata, so these are no statistics; give the file "
            "that `moequant calibrate` wrote"
        )
    try:
        return StatisticsRecord.model_validate_json(metadata[METADATA_KEY])
    except ValidationError as error:
        raise StatisticsError(
            f"{path}: {METADATA_KEY}: {first_fault(error)}; written by another version of "
            f"moequant, or damaged: {_REMEDY}"
        ) from None
