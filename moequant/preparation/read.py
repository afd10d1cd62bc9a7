"""Read a prepared folder back into portable weights, after checking that it is not stale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.checkpoint.buffers import tensor_bytes
from moequant.checkpoint.converted import ConvertedCheckpoint
from moequant.checkpoint.headers import DTYPES, read_header
from moequant.checkpoint.reader import FixedFile
from moequant.errors import CheckpointError
from moequant.layouts.targets import kernel_layout
from moequant.models import PROJECTIONS
from moequant.preparation.layers import unpack_expert
from moequant.preparation.manifest import (
    MANIFEST_FILE,
    Manifest,
    OriginalsDigest,
    read_manifest,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.preparation.manifest import PreparedLayer


def is_prepared_folder(path: Path) -> bool:
    """Whether `path` is a folder that `moequant prepare` wrote."""
    return (path / MANIFEST_FILE).is_file()


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
    def open(cls, folder: Path) -> PreparedCheckpoint:
        """Read the manifest and the headers of the originals.

        Raises:
            CheckpointError: no manifest, or the originals are not where they must be.
        """
        manifest = read_manifest(folder)
        converted = ConvertedCheckpoint.open(folder.resolve().parent.parent)
        return cls(folder=folder, manifest=manifest, converted=converted)

    def read_layer(self, layer: int) -> tuple[QuantizedWeight, QuantizedWeight, QuantizedWeight]:
        """Gate, up and down [E, N, K] of a layer, in their portable form.

        Raises:
            CheckpointError: the layer is not there, damaged, or stale: made from other originals
                or by another version of the layout.
        """
        entry = self.manifest.layers.get(layer)
        if entry is None:
            have = ", ".join(map(str, self.manifest.layers))
            raise CheckpointError(f"{self.folder}: no layer {layer}; prepared are {have}")
        layout = kernel_layout(entry.format, self.manifest.target)
        if (layout.name, layout.version) != (entry.layout, entry.layout_version):
            raise self._stale(
                layer,
                f"layout {entry.layout} version {entry.layout_version}, but this moequant reads "
                f"{layout.name} version {layout.version}",
            )
        self._check_originals(layer, entry)
        tensors = self._read_file(self.folder / entry.file, entry)
        return unpack_expert(tensors, layout, entry.format, self.converted.moe)

    def _read_file(self, path: Path, entry: PreparedLayer) -> dict[str, Tensor]:
        file = FixedFile.at(path)
        if file.size_bytes != entry.bytes:
            raise CheckpointError(
                f"{path}: {file.size_bytes} bytes, but its manifest says {entry.bytes}; "
                "run moequant prepare --overwrite"
            )
        infos = read_header(path, entry.file)
        tensors = {}
        for name, info in infos.items():
            tensors[name] = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="cpu")
            file.read_into(info.start, tensor_bytes(tensors[name]))
        return tensors

    def _check_originals(self, layer: int, entry: PreparedLayer) -> None:
        """Refuse a layer made from other weights than those that lie beside it now.

        Files of the same size and modification time are taken to be the same. If only the times
        differ, as after a copy or a download, the layer's portable weights are read and their
        digest decides.
        """
        now = self.converted.checkpoint.file_state()
        then = self.manifest.originals
        if now == then:
            return
        if {f: s[0] for f, s in now.items()} != {f: s[0] for f, s in then.items()}:
            raise self._stale(layer, "the converted checkpoint has other files now")
        digest = OriginalsDigest()
        for expert in range(self.converted.moe.experts):
            digest.update(self.converted.read_expert(layer, expert, p) for p in PROJECTIONS)
        if digest.hexdigest() != entry.originals_sha256:
            raise self._stale(layer, "the converted checkpoint has other weights now")

    def _stale(self, layer: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: layer {layer} is stale: {reason}; run moequant prepare "
            f"{self.converted.checkpoint.path} --target {self.manifest.target}"
        )
