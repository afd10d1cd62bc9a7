"""Compile the grouped GEMM of sm100_fp4_grouped_gemm.py once, and launch it.

Compiled, never run: there was no SM100 GPU. Rows, their scales and factors are what
`moequant.kernels.block_scaled_quantize` makes with a `Grouping` of tiles of 128 rows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from moequant.kernels.cuda_driver import Kernel, Launch, pointer, tensor_map
from moequant.kernels.cutlass.compiled import compile_once, load
from moequant.kernels.cutlass.sm100_fp4_variant import (
    SCALE_TILE_BYTES,
    STEP,
    THREADS,
    TILE_ROWS,
    WEIGHT_ROWS,
    Fp4Variant,
)

if TYPE_CHECKING:
    from torch import Tensor

_SOURCES = ("sm100_fp4_grouped_gemm.py", "sm100_fp4_variant.py")


def padded(rows: int) -> int:
    """`rows` with those that fill up the last tile of scales."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def scale_columns(K: int, group: int) -> int:
    """Scales of a row, padded to whole tiles of 4."""
    return -(-K // group // 4) * 4


def scale_words(scale: Tensor) -> Tensor:
    """A view of swizzled scales as TMA reads them: one row for every 128, int64.

    Args:
        scale: [..., 128 * tiles, 4 * G] of a one-byte dtype, or int32 [..., 128 * tiles, G];
            contiguous, swizzled 128x4.

    Returns:
        int64 [all tiles, 64 * G].
    """
    rows, columns = scale.view(torch.uint8).shape[-2:]
    assert scale.is_contiguous()
    assert rows % TILE_ROWS == columns % 4 == 0
    row_bytes = columns // 4 * SCALE_TILE_BYTES
    return scale.view(torch.uint8).view(-1, row_bytes).view(torch.int64)


def cubin_of(variant: Fp4Variant) -> bytes:
    """The compiled kernel, from the disk cache if it is there."""
    return compile_once(variant, _SOURCES, lambda: _compile(variant))


def _compile(variant: Fp4Variant) -> bytes:
    from moequant.kernels.cutlass.sm100_fp4_grouped_gemm import compile_variant

    return compile_variant(variant).cubin


class Fp4GroupedGemm:
    """A grouped GEMM over fixed weights and buffers; a call launches one kernel.

    It keeps no tensor: what it is given must outlive it.

    Args:
        variant: the kernel.
        x: uint8 [rows, K / 2] contiguous, rows in the order of the experts; K a multiple of 32.
        x_scale: [at least 128 * tiles, scale_columns(K)] contiguous, in bytes or int32 of four,
            swizzled 128x4, each expert's rows padded to a multiple of 128.
        x_factor: float32 [rows], of each row's results; None for a format without global scales.
        w: uint8 [E, N, K / 2] contiguous; N a multiple of 8.
        w_scale: one-byte [E, padded(N), scale_columns(K)] contiguous, each expert swizzled 128x4.
        alpha: float32 [E, A] contiguous, of the results of A equal parts of w; N / A a multiple of
            32 unless A = 1. None as for `x_factor`.
        tiles: int32 [most tiles, TILE_FIELDS], each expert's of 128 rows but for its last.
        tile_count: int32 [1].
        out: bfloat16 [rows, N] contiguous; rows of no tile are not written.
    """

    def __init__(
        self,
        variant: Fp4Variant,
        *,
        x: Tensor,
        x_scale: Tensor,
        x_factor: Tensor | None,
        w: Tensor,
        w_scale: Tensor,
        alpha: Tensor | None,
        tiles: Tensor,
        tile_count: Tensor,
        out: Tensor,
    ) -> None:
        E, N, row_bytes = w.shape
        K = 2 * row_bytes
        columns = scale_columns(K, variant.group)
        assert K % 32 == 0
        assert N % 8 == 0
        assert x.shape[1] == row_bytes
        assert out.shape == (x.shape[0], N)
        assert w_scale.shape == (E, padded(N), columns)
        assert x_scale.view(torch.uint8).shape[1] == columns
        assert x_scale.shape[0] >= tiles.shape[0] * TILE_ROWS
        parts = 1 if alpha is None else alpha.shape[1]
        assert parts == 1 or N % (32 * parts) == 0
        assert (alpha is not None) == (x_factor is not None) == variant.e4m3_scales
        index = out.device.index or 0
        units = tiles.shape[0] * -(-N // WEIGHT_ROWS)
        codes_box, scale_box = (TILE_ROWS, STEP // 2), (1, variant.scale_bytes // 8)
        operands = (
            (x, codes_box),
            (w.view(E * N, row_bytes), codes_box),
            (scale_words(x_scale), scale_box),
            (scale_words(w_scale), scale_box),
        )
        pointers = (x_factor, alpha, out, tiles, tile_count)
        self._launch = Launch(
            _kernel(variant, index),
            min(_multiprocessors(index), units),
            [
                *(
                    a
                    for tensor, box in operands
                    for a in (tensor_map(tensor, box=box), _shape(tensor))
                ),
                *map(pointer, pointers),
                ctypes.c_int(N),
                ctypes.c_int(K),
                ctypes.c_int(parts),
            ],
        )

    def __call__(self, stream: int) -> None:
        """Launch on a stream of CUDA's."""
        self._launch(stream)


PARAMETER_BYTES = (128, 8) * 4 + (8,) * 5 + (4,) * 3
"""Of the kernel's parameters: four TMA descriptors, each with its tensor's shape, then the rest."""


@cache
def _kernel(variant: Fp4Variant, device: int) -> Kernel:
    return load(cubin_of(variant), threads=THREADS, shared_bytes=variant.shared_bytes)


def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _shape(tensor: Tensor) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * 2)(*tensor.shape)
