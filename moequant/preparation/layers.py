"""One layer between its portable weights and its kernel-ready file, an expert at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.checkpoint.buffers import tensor_bytes
from moequant.checkpoint.headers import dtype_name
from moequant.checkpoint.writer import ShardWriter, lay_out
from moequant.layouts.gate_up import padded_rows, split_gate_up, stack_gate_up
from moequant.models import PROJECTIONS
from moequant.preparation.manifest import OriginalsDigest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from moequant.checkpoint.converted import ConvertedCheckpoint
    from moequant.formats import QuantizedWeight
    from moequant.layouts.targets import KernelLayout
    from moequant.models import MoeConfig
    from moequant.progress import Progress


def prepared_layer_file(layer: int) -> str:
    """Name of a layer's file in the prepared folder."""
    return f"layer-{layer:05d}.safetensors"


def write_layer(
    converted: ConvertedCheckpoint,
    layer: int,
    layout: KernelLayout,
    path: Path,
    progress: Progress,
) -> tuple[int, str, str]:
    """Write w13 and w2 of all experts of a layer, [E, ...] each.

    Returns:
        Size and SHA-256 of the file, and the digest of the portable weights read.
    """
    digest = OriginalsDigest()
    writer: ShardWriter | None = None
    try:
        for expert in range(converted.moe.experts):
            weights = [converted.read_expert(layer, expert, p) for p in PROJECTIONS]
            digest.update(weights)
            tensors = _pack_expert(weights, layout)
            if writer is None:
                writer = _open_writer(path, tensors, converted.moe.experts)
            for name, tensor in tensors.items():
                writer.write_bytes(name, expert * tensor.nbytes, tensor_bytes(tensor.contiguous()))
            progress.advance(sum(t.nbytes for t in tensors.values()), f"layer {layer}")
        assert writer is not None, "a layer has experts"
        size, sha256 = writer.finish()
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    return size, sha256, digest.hexdigest()


def unpack_expert(
    tensors: Mapping[str, Tensor], layout: KernelLayout, format: str, moe: MoeConfig
) -> tuple[QuantizedWeight, QuantizedWeight, QuantizedWeight]:
    """Gate, up and down, portable, from the tensors of one expert or of a batch [E, ...]."""
    lead = tensors["w2.qdata"].shape[: tensors["w2.qdata"].ndim - 2]
    rows = 2 * padded_rows(format, moe.intermediate)
    shapes = {
        "w13": torch.Size((*lead, rows, moe.hidden)),
        "w2": torch.Size((*lead, moe.hidden, moe.intermediate)),
    }
    w13, w2 = (layout.unpack(_parts_of(weight, tensors), shape) for weight, shape in shapes.items())
    gate, up = split_gate_up(w13, moe.intermediate)
    return gate, up, w2


def _pack_expert(weights: list[QuantizedWeight], layout: KernelLayout) -> dict[str, Tensor]:
    gate, up, down = weights
    packed = {"w13": layout.pack(stack_gate_up(gate, up)), "w2": layout.pack(down)}
    return {f"{w}.{part}": t for w, parts in packed.items() for part, t in parts.items()}


def _parts_of(weight: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{weight}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _open_writer(path: Path, tensors: Mapping[str, Tensor], experts: int) -> ShardWriter:
    """A file for `experts` times the tensors of one expert."""
    header, slots = lay_out(
        [(name, dtype_name(t.dtype), (experts, *t.shape)) for name, t in tensors.items()]
    )
    return ShardWriter(path, header, slots)
