"""Which layouts the kernels of a target read, for each format: a table.

A kernel layout turns one weight (w13 or w2 of an expert, or a batch [E, ...] of them) into the
named tensors a kernel takes, and back, without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, QuantizedWeight, check_parts, get_format
from moequant.layouts import cutlass_w4a8, deepgemm_scale, swizzle_128x4

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

TARGETS = ("sm90", "sm100")

ROW_MAJOR_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class KernelLayout:
    """The form in which one target's kernels take weights of one format.

    Attributes:
        format: name of the format.
        name: what the manifest of a prepared folder calls it.
        version: raised when the bytes of the same weight change.
        pack: weight [..., N, K], and what errors call it, to tensors by name; leading dimensions
            stay in front.
        unpack: tensors, the logical shape [..., N, K], and what errors call the weight, back to the
            weight.
    """

    format: str
    name: str
    version: int
    pack: Callable[[QuantizedWeight, str], dict[str, Tensor]]
    unpack: Callable[[Mapping[str, Tensor], torch.Size, str], QuantizedWeight]


def kernel_layout(format: str, target: str) -> KernelLayout:
    """The layout of `format` on `target`.

    Raises:
        UnsupportedError: no such format, no such target, or no kernel there takes the format.
    """
    get_format(format)
    if target not in TARGETS:
        raise UnsupportedError(f"no target is called {target!r}; there are: {', '.join(TARGETS)}")
    layout = _LAYOUTS.get((format, target))
    if layout is None:
        able = " and ".join(t for f, t in _LAYOUTS if f == format) or "none"
        raise UnsupportedError(f"{format} has no kernel on {target}; it can be prepared for {able}")
    return layout


def _row_major(format: str) -> KernelLayout:
    """Codes and scales as they are in memory."""

    def pack(q: QuantizedWeight, name: str) -> dict[str, Tensor]:
        return q.tensors()

    def unpack(tensors: Mapping[str, Tensor], shape: torch.Size, name: str) -> QuantizedWeight:
        return _weight(format, tensors, shape, name)

    return KernelLayout(
        format=format, name="row_major", version=ROW_MAJOR_VERSION, pack=pack, unpack=unpack
    )


def _swizzled(format: str) -> KernelLayout:
    """Codes row-major, scales in the 128x4 tiles of tcgen05."""

    def pack(q: QuantizedWeight, name: str) -> dict[str, Tensor]:
        return {**q.tensors(), "scale": swizzle_128x4.swizzle(q.scale)}

    def unpack(tensors: Mapping[str, Tensor], shape: torch.Size, name: str) -> QuantizedWeight:
        rows, cols = get_format(format).specs(shape, name)["scale"].shape[-2:]
        swizzled = _scale(tensors, name)
        scale = swizzle_128x4.unswizzle(swizzled, rows, cols, name=f"{name}.scale")
        return _weight(format, {**tensors, "scale": scale}, shape, name)

    return KernelLayout(
        format=format,
        name="swizzle_128x4",
        version=swizzle_128x4.VERSION,
        pack=pack,
        unpack=unpack,
    )


def _packed_ue8m0(format: str) -> KernelLayout:
    """Codes row-major, scales as DeepGEMM reads them on SM100."""
    block_n = get_format(format).block[0]

    def pack(q: QuantizedWeight, name: str) -> dict[str, Tensor]:
        scale = deepgemm_scale.pack_ue8m0(
            q.scale, q.shape[-2], block_n=block_n, name=f"{name}.scale"
        )
        return {**q.tensors(), "scale": scale}

    def unpack(tensors: Mapping[str, Tensor], shape: torch.Size, name: str) -> QuantizedWeight:
        spec = get_format(format).specs(shape, name)["scale"]
        scale = deepgemm_scale.unpack_ue8m0(
            _scale(tensors, name),
            shape[-2],
            spec.shape[-1],
            block_n=block_n,
            dtype=spec.dtype,
            name=f"{name}.scale",
        )
        return _weight(format, {**tensors, "scale": scale}, shape, name)

    return KernelLayout(
        format=format,
        name="deepgemm_ue8m0",
        version=deepgemm_scale.VERSION,
        pack=pack,
        unpack=unpack,
    )


def _scale(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if "scale" not in tensors:
        raise CheckpointError(f"{name}.scale is missing; prepare the checkpoint again")
    return tensors["scale"]


def _weight(
    format: str, parts: Mapping[str, Tensor], shape: torch.Size, name: str
) -> QuantizedWeight:
    check_parts(parts, format, shape, name)
    return QuantizedWeight(
        format=format,
        qdata=parts["qdata"],
        scale=parts["scale"],
        global_scale=parts.get("global_scale"),
        shape=shape,
    )


_LAYOUTS: dict[tuple[str, str], KernelLayout] = {
    (format, target): _row_major(format) for format in CONVERTIBLE for target in TARGETS
} | {
    ("fp8_block", "sm100"): _packed_ue8m0("fp8_block"),
    ("nvfp4", "sm100"): _swizzled("nvfp4"),
    ("mxfp4", "sm100"): _swizzled("mxfp4"),
    ("w4a8", "sm90"): KernelLayout(
        format="w4a8",
        name="cutlass_w4a8",
        version=cutlass_w4a8.VERSION,
        pack=cutlass_w4a8.pack_w4a8,
        unpack=cutlass_w4a8.unpack_w4a8,
    ),
}
# The CUTLASS kernel for INT4 weights and FP8 activations is written for SM90.
del _LAYOUTS["w4a8", "sm100"]
