"""Read a prepared folder back into portable weights, after checking that it is not stale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError, MoequantError
from moequant.layouts import gate_up
from moequant.layouts.targets import kernel_layout
from moequant.preparation.layers import LayerFile, check_size
from moequant.preparation.manifest import Manifest, OriginalsDigest, read_manifest
from moequant.storage.files import PREPARED_FOLDER
from moequant.weights.converted import ConvertedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from moequant.formats import QuantizedWeight
    from moequant.layouts.targets import KernelLayout
    from moequant.preparation.manifest import PreparedLayer


@dataclass(frozen=True, kw_only=True)
class PreparedCheckpoint:
    """A prepared folder and the converted checkpoint it stands in.

    Attributes:
        folder: CONVERTED/moequant-prepared/TARGET.
        manifest: what it says of itself.
        converted: CONVERTED.
    """

    folder: Path
    manifest: Manifest
    converted: ConvertedCheckpoint

    @classmethod
    def open(cls, folder: Path, *, architecture: str | Path | None = None) -> PreparedCheckpoint:
        """Read the manifest and the headers of the originals.

        Args:
            folder: where it lies.
            architecture: as for `ConvertedCheckpoint.open`.

        Raises:
            CheckpointError: no manifest, or the originals are not where they must be.
        """
        manifest = read_manifest(folder)
        home = folder.resolve().parent
        if home.name != PREPARED_FOLDER:
            raise CheckpointError(
                f"{folder}: lies in {home}, but a prepared folder is read where it was written, in "
                f"CONVERTED/{PREPARED_FOLDER}; move it back, or run moequant prepare again"
            )
        converted = ConvertedCheckpoint.open(home.parent, architecture=architecture)
        return cls(folder=folder, manifest=manifest, converted=converted)

    def read_layer(
        self, layer: int, experts: Sequence[int] | None = None
    ) -> tuple[QuantizedWeight, ...]:
        """Gate, up and down [E, N, K] of a layer, or up and down, in their portable form.

        Args:
            layer: index of the layer.
            experts: read these alone, at least one, in this order; by default all.

        Raises:
            CheckpointError: the layer is not there, damaged, or stale: made from other originals
                or by another version of the layout.
        """
        file, layout = self.open_layer(layer)
        moe = self.converted.moe
        chosen = range(moe.experts) if experts is None else experts
        return _batch((file.read(expert, layout, moe) for expert in chosen), len(chosen))

    def open_layer(self, layer: int) -> tuple[LayerFile, KernelLayout]:
        """The file of a layer, to be read an expert at a time, and the layout it is in.

        Raises:
            CheckpointError: as `read_layer`.
        """
        entry = self.manifest.layers.get(layer)
        if entry is None:
            have = ", ".join(map(str, self.manifest.layers))
            raise CheckpointError(f"{self.folder}: no layer {layer}; prepared are {have}")
        layout = self._layout(layer, entry)
        self._check_originals(layer, entry)
        return LayerFile.open(self.folder, layer, entry, self.converted.moe.experts), layout

    def staleness(self) -> str | None:
        """Why a layer would be refused, as far as sizes and times of files tell.

        Returns:
            None where nothing changed since the folder was written. If the originals' times alone
            are others, the weights decide, which only loading reads: that is said here too.
        """
        try:
            for layer, entry in self.manifest.layers.items():
                self._layout(layer, entry)
                self._check_sizes(layer)
                check_size(self.folder / entry.file, entry)
        except MoequantError as error:
            return str(error)
        if self.converted.checkpoint.file_state() != self.manifest.originals:
            return (
                "the converted checkpoint's files have other times than when it was prepared; "
                "loading compares the weights"
            )
        return None

    def _layout(self, layer: int, entry: PreparedLayer) -> KernelLayout:
        """The layout of this moequant, if the layer was made by it."""
        layout = kernel_layout(entry.format, self.manifest.target)
        versions = (
            (entry.layout, entry.layout_version, layout.name, layout.version),
            ("gate_up", self.manifest.gate_up_version, "gate_up", gate_up.VERSION),
        )
        for found, version, wanted, wanted_version in versions:
            if (found, version) != (wanted, wanted_version):
                raise self._stale(
                    layer,
                    f"layout {found} version {version}, but this moequant reads {wanted} version "
                    f"{wanted_version}",
                )
        return layout

    def _check_originals(self, layer: int, entry: PreparedLayer) -> None:
        """Refuse a layer made from other weights than those that lie beside it now.

        Files of the same size and modification time are taken to be the same. If only the times
        differ, as after a copy or a download, the layer's portable weights are read and their
        digest decides.
        """
        if self.converted.checkpoint.file_state() == self.manifest.originals:
            return
        self._check_sizes(layer)
        digest = OriginalsDigest()
        projections = self.converted.moe.projections
        for expert in range(self.converted.moe.experts):
            digest.update(self.converted.read_expert(layer, expert, p) for p in projections)
        if digest.hexdigest() != entry.originals_sha256:
            raise self._stale(layer, "the converted checkpoint has other weights now")

    def _check_sizes(self, layer: int) -> None:
        now, then = self.converted.checkpoint.file_bytes, self.manifest.originals
        if now != {file: state[0] for file, state in then.items()}:
            raise self._stale(layer, "the converted checkpoint has other files now")

    def _stale(self, layer: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: layer {layer} is stale: {reason}; run moequant prepare "
            f"{self.converted.checkpoint.path} --target {self.manifest.target}"
        )


def _batch(
    experts: Iterable[tuple[QuantizedWeight, ...]], count: int
) -> tuple[QuantizedWeight, ...]:
    """The projections of `count` experts, [count, ...] each; holds one expert beside them."""
    batches: list[QuantizedWeight] = []
    for row, weights in enumerate(experts):
        if not batches:
            batches = [_room_for(count, q) for q in weights]
        for batch, q in zip(batches, weights, strict=True):
            for part, tensor in q.tensors().items():
                batch.tensors()[part][row].copy_(tensor)
    return tuple(batches)


def _room_for(count: int, q: QuantizedWeight) -> QuantizedWeight:
    return q.map(lambda t: t.new_empty((count, *t.shape)), torch.Size((count, *q.shape)))
