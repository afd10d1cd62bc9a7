"""One layer between its portable weights and its kernel-ready file, an expert at a time.

The file holds w13 and w2 of all experts, [E, ...] each, under names that say which layer it is:
`layers.3.w13.qdata`. Of experts without a gate w13 is up alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError
from moequant.layouts.gate_up import padded_rows, split_gate_up, stack_gate_up
from moequant.preparation.manifest import OriginalsDigest, PreparedLayer
from moequant.storage.buffers import tensor_bytes
from moequant.storage.disk import sha256_of
from moequant.storage.headers import DTYPES, dtype_name, read_header
from moequant.storage.reader import FixedFile
from moequant.storage.writer import ShardWriter, lay_out

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from moequant.formats import QuantizedWeight
    from moequant.layouts.targets import KernelLayout
    from moequant.models import MoeConfig
    from moequant.progress import Progress
    from moequant.storage.headers import TensorInfo
    from moequant.weights.converted import ConvertedCheckpoint

_REMEDY = "run moequant prepare --overwrite"


def write_layer(
    converted: ConvertedCheckpoint,
    layer: int,
    layout: KernelLayout,
    folder: Path,
    progress: Progress,
) -> PreparedLayer:
    """Write w13 and w2 of all experts of a layer, and say what the manifest shall say of them."""
    path = folder / f"layer-{layer:05d}.safetensors"
    digest = OriginalsDigest()
    writer: ShardWriter | None = None
    moe = converted.moe
    try:
        for expert in range(moe.experts):
            weights = [converted.read_expert(layer, expert, p) for p in moe.projections]
            digest.update(weights)
            module = converted.expert_module(layer, expert, "down").rpartition(".")[0]
            tensors = _pack_expert(weights, layout, layer, module)
            if writer is None:
                writer = _open_writer(path, tensors, moe.experts)
            for name, tensor in tensors.items():
                writer.write_bytes(name, expert * tensor.nbytes, tensor_bytes(tensor.contiguous()))
            progress.advance(sum(t.nbytes for t in tensors.values()), f"layer {layer}")
        assert writer is not None, "a layer has experts"
        size, sha256 = writer.finish()
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    return PreparedLayer(
        file=path.name,
        bytes=size,
        mtime_ns=FixedFile.at(path).mtime_ns,
        sha256=sha256,
        format=layout.format,
        layout=layout.name,
        layout_version=layout.version,
        originals_sha256=digest.hexdigest(),
    )


@dataclass(frozen=True, kw_only=True)
class LayerFile:
    """A prepared layer's file, read one expert at a time.

    Attributes:
        layer: the layer it holds.
        file: where it is.
        tensors: every tensor, by name.
    """

    layer: int
    file: FixedFile
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path, layer: int, entry: PreparedLayer, experts: int) -> LayerFile:
        """Check that the file is the one that was written for this layer.

        Raises:
            CheckpointError: it is not there, damaged, or another layer's.
        """
        path = folder / entry.file
        file = check_size(path, entry)
        tensors = read_header(path, entry.file)
        for info in tensors.values():
            _check_header(path, layer, info, experts)
        if file.mtime_ns != entry.mtime_ns and sha256_of(path) != entry.sha256:
            raise CheckpointError(
                f"{path}: damaged: its SHA-256 is not the one in its manifest; {_REMEDY}"
            )
        return cls(layer=layer, file=file, tensors=tensors)

    def read(
        self, expert: int, layout: KernelLayout, moe: MoeConfig
    ) -> tuple[QuantizedWeight, ...]:
        """Gate, up and down of one expert, or up and down, portable.

        Raises:
            CheckpointError: unreadable, or not what the layout makes of such an expert.
        """
        tensors = {}
        for name, info in self.parts(expert).items():
            tensors[name] = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="cpu")
            self.file.read_into(info.start, tensor_bytes(tensors[name]))
        return self.unpack(expert, tensors, layout, moe)

    def parts(self, expert: int) -> dict[str, TensorInfo]:
        """Which bytes of the file are one expert's, by name of the tensor they are a part of."""
        parts = {}
        for name, info in self.tensors.items():
            size_bytes = info.size_bytes // info.shape[0]
            start = info.start + expert * size_bytes
            parts[name] = info._replace(shape=info.shape[1:], start=start, stop=start + size_bytes)
        return parts

    def unpack(
        self, expert: int, tensors: Mapping[str, Tensor], layout: KernelLayout, moe: MoeConfig
    ) -> tuple[QuantizedWeight, ...]:
        """Gate, up and down of one expert, or up and down, portable, of its parts.

        Raises:
            CheckpointError: they are not what the layout makes of such an expert.
        """
        gated = moe.act_fn.gated
        rows = 2 * padded_rows(layout.format, moe.intermediate) if gated else moe.intermediate
        shapes = {
            "w13": (rows, moe.hidden),
            "w2": (moe.hidden, moe.intermediate),
        }
        names = {w: f"{self.file.path}: expert {expert} of layers.{self.layer}.{w}" for w in shapes}
        w13, w2 = (
            layout.unpack(self._of(weight, tensors), torch.Size(shape), names[weight])
            for weight, shape in shapes.items()
        )
        if not gated:
            return w13, w2
        gate, up = split_gate_up(w13, moe.intermediate, name=names["w13"])
        return gate, up, w2

    def _of(self, weight: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the kernel reads of one weight, by the layout's names."""
        prefix = f"layers.{self.layer}.{weight}."
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def check_size(path: Path, entry: PreparedLayer) -> FixedFile:
    """The file of a layer, if it has the size that it had.

    Raises:
        CheckpointError: it has not, or it is not there.
    """
    file = FixedFile.at(path)
    if file.size_bytes != entry.bytes:
        raise CheckpointError(
            f"{path}: {file.size_bytes} bytes, but its manifest says {entry.bytes}; {_REMEDY}"
        )
    return file


def _check_header(path: Path, layer: int, info: TensorInfo, experts: int) -> None:
    if not info.name.startswith(f"layers.{layer}."):
        raise CheckpointError(
            f"{path}: holds {info.name}, but layer {layer} is wanted here; {_REMEDY}"
        )
    if info.dtype not in DTYPES or info.shape[:1] != (experts,):
        raise CheckpointError(
            f"{path}: {info.name} is {info.dtype} {list(info.shape)}, but the first dimension "
            f"should be the {experts} experts of config.json; {_REMEDY}"
        )


def _pack_expert(
    weights: list[QuantizedWeight], layout: KernelLayout, layer: int, module: str
) -> dict[str, Tensor]:
    """The tensors of one expert by their names in the file; errors say MODULE.w13 or MODULE.w2."""
    *first, down = weights
    w13 = first[0] if len(first) == 1 else stack_gate_up(*first, name=f"{module}.w13")
    packed = {
        "w13": layout.pack(w13, f"{module}.w13"),
        "w2": layout.pack(down, f"{module}.w2"),
    }
    return {
        f"layers.{layer}.{w}.{part}": t for w, parts in packed.items() for part, t in parts.items()
    }


def _open_writer(path: Path, tensors: Mapping[str, Tensor], experts: int) -> ShardWriter:
    """A file for `experts` times the tensors of one expert."""
    header, slots = lay_out(
        [(name, dtype_name(t.dtype), (experts, *t.shape)) for name, t in tensors.items()]
    )
    return ShardWriter(path, header, slots)
