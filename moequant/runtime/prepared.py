"""A prepared folder: the tensors of layers as a backend reads them, and whether they still fit.

The file of a layer holds the tensors of its `Layout` for all experts, [E, ...] each, under names
that say which layer it is: `layers.3.w13_qdata`. If the layer was prepared for activations with
static scales, these are among them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError, MoequantError, UnsupportedError
from moequant.runtime.backends import TARGETS, backends
from moequant.runtime.prepared_manifest import (
    Manifest,
    add_originals,
    add_tensors,
    read_manifest,
)
from moequant.runtime.weights import weights_without_data
from moequant.storage.buffers import tensor_bytes
from moequant.storage.checkpoint import Checkpoint
from moequant.storage.disk import sha256_of
from moequant.storage.files import MANIFEST_FILE, PREPARED_FOLDER
from moequant.storage.headers import DTYPES, read_header
from moequant.storage.reader import FixedFile
from moequant.weights.converted import ConvertedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.models import MoeConfig
    from moequant.runtime.backends import Layout
    from moequant.runtime.prepared_manifest import PreparedLayer
    from moequant.storage.headers import TensorInfo


@dataclass(frozen=True, kw_only=True)
class LayerFile:
    """A prepared layer's file.

    Attributes:
        file: where it is.
        tensors: every tensor, by its name in the layout.
        remedy: what to do if it is wrong.
    """

    file: FixedFile
    tensors: Mapping[str, TensorInfo]
    remedy: str

    @classmethod
    def open(cls, folder: Path, layer: int, entry: PreparedLayer, remedy: str) -> LayerFile:
        """Check that the file is the one that was written for this layer.

        Args:
            folder: the prepared folder.
            layer: which.
            entry: what the manifest says of it.
            remedy: what to do if it is another.

        Raises:
            CheckpointError: it is not there, damaged, or another layer's.
        """
        path = folder / entry.file
        file = check_size(path, entry, remedy)
        if file.mtime_ns != entry.mtime_ns and sha256_of(path) != entry.sha256:
            raise CheckpointError(
                f"{path}: damaged: its SHA-256 is not the one in its manifest; {remedy}"
            )
        return cls.of_header(file, layer, entry, remedy)

    @classmethod
    def of_header(cls, file: FixedFile, layer: int, entry: PreparedLayer, remedy: str) -> LayerFile:
        """What the header says, whatever the bytes of the tensors are; arguments as `open`.

        Raises:
            CheckpointError: it has no header of this layer.
        """
        path = file.path
        prefix = f"layers.{layer}."
        tensors = {}
        for name, info in _read_layer_header(path, entry, remedy).items():
            if not name.startswith(prefix):
                raise CheckpointError(
                    f"{path}: holds {name}, but must hold layer {layer}; {remedy}"
                )
            tensors[name.removeprefix(prefix)] = info
        return cls(file=file, tensors=tensors, remedy=remedy)

    def check(self, like: Mapping[str, Tensor], *, experts: int) -> None:
        """Check names, dtypes and shapes against tensors of any number of experts.

        Raises:
            CheckpointError: they are not what the layout makes of the layer.
        """
        expected = {name: (t.dtype, [experts, *t.shape[1:]]) for name, t in like.items()}
        for name in expected.keys() | self.tensors.keys():
            info, wanted = self.tensors.get(name), expected.get(name)
            if info is None or (DTYPES.get(info.dtype), list(info.shape)) != wanted:
                found = "missing" if info is None else f"{info.dtype} {list(info.shape)}"
                should = "not there" if wanted is None else f"{wanted[0]} {wanted[1]}"
                raise CheckpointError(
                    f"{self.file.path}: {name} is {found}, but should be {should}; {self.remedy}"
                )

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A tensor, or one expert of it, [1, ...], on the CPU; errors as `FixedFile.read_into`."""
        info = self.tensors[name] if expert is None else self.expert(name, expert)
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="cpu")
        self.file.read_into(info.start, tensor_bytes(tensor))
        return tensor

    def expert(self, name: str, expert: int) -> TensorInfo:
        """Where the bytes of one expert of a tensor are."""
        info = self.tensors[name]
        size_bytes = info.size_bytes // info.shape[0]
        start = info.start + expert * size_bytes
        return info._replace(shape=(1, *info.shape[1:]), start=start, stop=start + size_bytes)


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
    def open(
        cls,
        folder: Path,
        *,
        architecture: str | Path | None = None,
        quantized_activations: bool = False,
    ) -> PreparedCheckpoint:
        """Read the manifest, and of the originals what it does not say.

        Arguments and errors as `ConvertedCheckpoint.open`.

        Raises:
            CheckpointError: no manifest, or one of another folder, or the originals are not where
                they must be.
        """
        manifest = read_manifest(folder)
        place = folder.resolve()
        home = place.parent
        if home.name != PREPARED_FOLDER:
            raise CheckpointError(
                f"{folder}: is in {home}, but a prepared folder is read only where it was written, "
                f"in CONVERTED/{PREPARED_FOLDER}; move it back, or run moequant prepare again"
            )
        if manifest.target != place.name:
            rename = f"rename the folder to {manifest.target}"
            remedy = remedy_of(folder, manifest) if place.name in TARGETS else rename
            raise CheckpointError(
                f"{folder / MANIFEST_FILE}: target: must be {place.name}, as its folder is called, "
                f"but found {manifest.target}; {remedy}"
            )
        converted = ConvertedCheckpoint.of(
            Checkpoint.open_known(home.parent, manifest.originals),
            architecture=architecture,
            quantized_activations=quantized_activations,
        )
        return cls(folder=folder, manifest=manifest, converted=converted)

    @cached_property
    def _remedy(self) -> str:
        return remedy_of(self.folder, self.manifest)

    def entry(self, layer: int) -> PreparedLayer:
        """What the manifest says of a layer.

        Raises:
            CheckpointError: the layer is not there.
        """
        entry = self.manifest.layers.get(layer)
        if entry is None:
            have = ", ".join(map(str, self.manifest.layers))
            raise CheckpointError(f"{self.folder}: no layer {layer}; prepared layers: {have}")
        return entry

    def open_layer(self, layer: int) -> tuple[LayerFile, Layout, str]:
        """The file of a layer, the layout it is in, and its format.

        Raises:
            CheckpointError: the layer is not there, damaged, or stale: made from other originals,
                or in a layout that no backend reads.
            UnsupportedError: config.json says something of the layer that is not supported.
        """
        entry = self.entry(layer)
        layout = self._layout(layer, entry)
        self._check_originals(layer, entry)
        file = LayerFile.open(self.folder, layer, entry, self._remedy)
        self._check_header(file, layer, entry, layout)
        return file, layout, entry.format

    def _check_header(
        self, file: LayerFile, layer: int, entry: PreparedLayer, layout: Layout
    ) -> None:
        """Refuse a file that has other tensors than config.json and the manifest say."""
        moe = self.converted.moe
        try:
            like = expected(
                layout,
                moe,
                entry.format,
                act_fn=moe.act_fn_of(layer),
                biased="w2_bias" in file.tensors,
                static=entry.has_input_scales,
            )
        except UnsupportedError as error:
            raise UnsupportedError(f"{file.file.path}: {error}; {self._remedy}") from error
        file.check(like, experts=moe.experts)

    def staleness(self) -> str | None:
        """Why a layer would be refused, as far as headers and sizes and times of files tell.

        Returns:
            None where nothing changed since the folder was written. If the times alone are others,
            the bytes decide, which only loading reads: that is said here too.
        """
        same_times = True
        try:
            for layer, entry in self.manifest.layers.items():
                layout = self._layout(layer, entry)
                self._check_sizes(layer)
                file = check_size(self.folder / entry.file, entry, self._remedy)
                header = LayerFile.of_header(file, layer, entry, self._remedy)
                self._check_header(header, layer, entry, layout)
                same_times = same_times and file.mtime_ns == entry.mtime_ns
        except MoequantError as error:
            return str(error)
        if self.converted.checkpoint.file_state() != self.manifest.originals:
            return (
                "the converted checkpoint's files have other times than when it was prepared; "
                "loading compares the weights"
            )
        if not same_times:
            return "files have other times than when they were written; loading compares digests"
        return None

    def _layout(self, layer: int, entry: PreparedLayer) -> Layout:
        """The layout of the layer, if a backend reads it and config.json says the same format."""
        if not self.converted.has_experts(layer):
            raise self._stale(layer, "the converted checkpoint has no experts in it")
        stated = self.converted.format_of_experts(layer)
        if stated != entry.format:
            raise self._stale(
                layer,
                f"it holds {entry.format}, but config.json says {stated or 'not converted'}",
                same_formats=False,
            )
        known = {str(layout): layout for b in backends().values() for layout in b.layouts}
        found = f"{entry.layout} version {entry.layout_version}"
        if found not in known:
            raise self._stale(
                layer, f"it is in layout {found}, but the backends here read {', '.join(known)}"
            )
        return known[found]

    def _check_originals(self, layer: int, entry: PreparedLayer) -> None:
        """Refuse a layer made from other weights than the checkpoint has now.

        Files of the same size and modification time are taken to be the same. If only the times
        differ, as after a copy or a download, the layer's portable tensors are read and their
        digest decides.
        """
        if self.converted.checkpoint.file_state() == self.manifest.originals:
            return
        self._check_sizes(layer)
        digest = hashlib.sha256()
        moe = self.converted.moe
        add_tensors(digest, self.converted.read_biases(layer) or {})
        if entry.has_input_scales:
            add_tensors(digest, self.converted.read_input_scales(layer, range(moe.experts)))
        for expert in range(moe.experts):
            weights = (self.converted.read_expert(layer, expert, p) for p in moe.projections)
            add_originals(digest, weights)
        if digest.hexdigest() != entry.originals_sha256:
            raise self._stale(
                layer, "the checkpoint has other weights, biases or static scales now"
            )

    def _check_sizes(self, layer: int) -> None:
        now, then = (
            {file: state[0] for file, state in states.items()}
            for states in (self.converted.checkpoint.file_state(), self.manifest.originals)
        )
        if now != then:
            raise self._stale(layer, "the converted checkpoint has other files now")

    def _stale(self, layer: int, reason: str, *, same_formats: bool = True) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}: layer {layer} is stale: {reason}; run "
            f"{self.manifest.command(self.folder, same_formats=same_formats)}"
        )


def expected(
    layout: Layout, moe: MoeConfig, format: str, *, act_fn: ActFn, biased: bool, static: bool
) -> dict[str, Tensor]:
    """What `layout` makes of no experts: names, dtypes, and all dimensions but the first.

    Raises:
        UnsupportedError: the layout does not hold weights of this format or these sizes.
    """
    shapes = tuple((p, (0, *moe.shape(p))) for p in moe.projections)
    return _pack_none(layout, shapes, format, act_fn, biased, static)


@cache
def _pack_none(
    layout: Layout,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    format: str,
    act_fn: ActFn,
    biased: bool,
    static: bool,
) -> dict[str, Tensor]:
    # Kept, because it takes tens of milliseconds, and the layers of a model are alike.
    weights = weights_without_data(
        format, dict(shapes), act_fn, biased=biased, static=static, device="cpu"
    )
    return layout.pack(weights)


def remedy_of(folder: Path, manifest: Manifest, *, same_formats: bool = True) -> str:
    """What to do with a folder whose files are not those that were written.

    Args:
        folder: which.
        manifest: its manifest.
        same_formats: as `Manifest.command`.
    """
    return f"run {manifest.command(folder, same_formats=same_formats)} --overwrite"


def layer_header(path: Path, entry: PreparedLayer, remedy: str) -> dict[str, TensorInfo]:
    """What the file of a layer says of its tensors, by name; arguments as `check_size`.

    Raises:
        CheckpointError: as `check_size`, or it is no safetensors.
    """
    check_size(path, entry, remedy)
    return _read_layer_header(path, entry, remedy)


def _read_layer_header(path: Path, entry: PreparedLayer, remedy: str) -> dict[str, TensorInfo]:
    try:
        return read_header(path, entry.file)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: damaged: it has no valid header; {remedy}") from error


def check_size(path: Path, entry: PreparedLayer, remedy: str) -> FixedFile:
    """The file of a layer, if it has the size that it had.

    Args:
        path: where it is.
        entry: what the manifest says of it.
        remedy: what to do if it has another.

    Raises:
        CheckpointError: it has not, it is not there, or it may not be read.
    """
    try:
        file = FixedFile.at(path)
        file.read(0, 0)  # opens it: who may not read it is not told that it is damaged
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or {remedy}") from error
    if file.size_bytes != entry.bytes:
        raise CheckpointError(
            f"{path}: {file.size_bytes} bytes, but its manifest says {entry.bytes}; {remedy}"
        )
    return file
