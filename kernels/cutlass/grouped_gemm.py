"""Compile the grouped GEMM of sm90_fp8_channel_grouped_gemm.py once, and launch it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from moequant.kernels.cuda_driver import Kernel, Launch, pointer, tensor_map
from moequant.kernels.cutlass.compiled import compile_once, load
from moequant.kernels.cutlass.variant import COLUMNS, THREADS, WEIGHT_ROWS, GemmVariant

if TYPE_CHECKING:
    from torch import Tensor

_SOURCES = ("sm90_fp8_channel_grouped_gemm.py", "variant.py")


def cubin_of(variant: GemmVariant) -> bytes:
    """The compiled kernel, from the disk cache if it is there."""
    return compile_once(variant, _SOURCES, lambda: _compile(variant))


def _compile(variant: GemmVariant) -> bytes:
    from moequant.kernels.cutlass.sm90_fp8_channel_grouped_gemm import compile_variant

    cubin, _ = compile_variant(variant)
    return cubin


class CutlassGroupedGemm:
    """A grouped GEMM over fixed weights and buffers; a call launches one kernel.

    It keeps no tensor: what it is given must outlive it.

    Args:
        variant: the kernel.
        w: float8_e4m3fn [E, N, K] contiguous, N and K multiples of 16.
        w_scale: float32, E * N of them, contiguous.
        x: float8_e4m3fn [rows, K] contiguous, rows in the order of the experts.
        x_scale: float32 [rows].
        bias: float32 [E, N] contiguous, if `variant` has one; else None.
        tiles: int32 [most tiles, TILE_FIELDS], of at most `variant.tile_rows` rows each.
        tile_count: int32 [1].
        out: bfloat16 [rows, N] contiguous; rows of no tile are not written.
    """

    def __init__(
        self,
        variant: GemmVariant,
        *,
        w: Tensor,
        w_scale: Tensor,
        x: Tensor,
        x_scale: Tensor,
        bias: Tensor | None,
        tiles: Tensor,
        tile_count: Tensor,
        out: Tensor,
    ) -> None:
        E, N, K = w.shape
        assert N % 16 == 0
        assert K % 16 == 0
        assert (bias is not None) == variant.bias
        assert bias is None or (bias.is_contiguous() and bias.shape == (E, N))
        assert out.shape == (x.shape[0], N)
        index = out.device.index or 0
        units = tiles.shape[0] * -(-N // WEIGHT_ROWS)
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        self._launch = Launch(
            _kernel(variant, index),
            min(sms, units),
            [
                tensor_map(w.view(torch.uint8).view(E * N, K), box=(WEIGHT_ROWS, COLUMNS)),
                _shape(E * N, K),
                tensor_map(x.view(torch.uint8), box=(variant.tile_rows, COLUMNS)),
                _shape(*x.shape),
                *map(pointer, (w_scale, x_scale, bias, out, tiles, tile_count)),
                ctypes.c_int(N),
                ctypes.c_int(K),
            ],
        )

    def __call__(self, stream: int) -> None:
        """Launch on a stream of CUDA's."""
        self._launch(stream)


PARAMETER_BYTES = (128, 8, 128, 8, 8, 8, 8, 8, 8, 8, 4, 4)
"""Of the kernel's parameters: two TMA descriptors, each with its tensor's shape, then the rest."""


@cache
def _kernel(variant: GemmVariant, device: int) -> Kernel:
    return load(cubin_of(variant), threads=THREADS, shared_bytes=variant.shared_bytes)


def _shape(rows: int, columns: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * 2)(rows, columns)
