"""The scale layouts of DeepGEMM: MN-major FP32, and UE8M0 packed four to an int32 for SM100.

Both are transposed, and each column is padded to 16 bytes (4 elements) for TMA. With R rows (tokens
of an activation, or N of a weight), C scales along K, and Rp = ceil4(R):

    FP32    storage float32 [..., C, Rp]             storage[c, r] = scale[r, c]
    UE8M0   storage int32   [..., ceil(C / 4), Rp]   byte i of storage[j, r] is the exponent byte
                                                     of scale[r // block_n, 4 * j + i]

Little-endian, byte 0 the lowest. SM100 reads one scale per row, so the rows of a block repeat its
scale. Padding, of rows and of the last int32, is zero: DeepGEMM zeroes the latter and leaves the
former unspecified, and files must be the same bytes every time.

`storage` is what files hold and what moves between devices; `mn_major_view` turns it into what
DeepGEMM takes, [..., R, columns] with strides (1, Rp). Take the view last: `Tensor.to` and `clone`
drop the padding of a padded view.

SM90 wants the FP32 form for activation scales only. The scales of fp8_block weights go to it as
they are on disk, float32 [E, ceil(N / 128), ceil(K / 128)] contiguous; it refuses them padded.

Source: DeepGEMM 54e2261, `csrc/apis/layout.hpp`, `csrc/utils/layout.hpp`, `smxx_layout.hpp`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats.base import TensorSpec

VERSION = 1

_TMA_ROWS = 4
_CODES_PER_WORD = 4


def aligned_shape(rows: int, cols: int) -> tuple[int, int]:
    """Last two dimensions of the FP32 storage of scales [..., rows, cols]."""
    return cols, -(-rows // _TMA_ROWS) * _TMA_ROWS


def packed_shape(rows: int, cols: int) -> tuple[int, int]:
    """Last two dimensions of the UE8M0 storage for `rows` weight rows and `cols` scales along K."""
    return aligned_shape(rows, -(-cols // _CODES_PER_WORD))


def mn_major_view(storage: Tensor, rows: int) -> Tensor:
    """What DeepGEMM takes: [..., rows, columns] over `storage`, strides (1, ceil4(rows)), no copy.

    Args:
        storage: [..., columns, ceil4(rows)] contiguous, from `align_mn_major` or `pack_ue8m0`.
        rows: R, without padding.
    """
    return storage.mT[..., :rows, :]


def align_mn_major(scale: Tensor) -> Tensor:
    """FP32 scales to MN-major storage, each row count padded to 16 bytes.

    Args:
        scale: [..., R, C] float32.

    Returns:
        [..., C, ceil4(R)] float32, contiguous, padding zero; see `mn_major_view`.

    Raises:
        UnsupportedError: `scale` is not float32.
    """
    if scale.dtype != torch.float32:
        raise UnsupportedError(f"the MN-major layout holds float32 scales, not {scale.dtype}")
    return _store_mn_major(scale)


def unalign_mn_major(storage: Tensor, rows: int, *, name: str = "scale") -> Tensor:
    """Inverse of `align_mn_major`.

    Args:
        storage: [..., C, ceil4(rows)] float32.
        rows: R of the scales.
        name: what errors call the tensor.

    Returns:
        [..., rows, C] float32, contiguous.

    Raises:
        CheckpointError: the dtype or shape is not that of `rows` rows, or the padding is not zero.
    """
    wanted = TensorSpec(dtype=torch.float32, shape=aligned_shape(rows, storage.shape[-2]))
    return _load_mn_major(storage, rows, wanted, name)


def pack_ue8m0(scale: Tensor, rows: int, *, block_n: int, name: str = "scale") -> Tensor:
    """Power-of-two scales to the packed UE8M0 storage of SM100.

    Args:
        scale: [..., ceil(rows / block_n), C] float32 powers of two (fp8_block), or
            float8_e8m0fnu or uint8 exponent bytes (mxfp4), which are taken as they are.
        rows: N of the weight.
        block_n: rows that share a scale: 128 for fp8_block, 1 for mxfp4.
        name: what errors call the tensor.

    Returns:
        [..., ceil(C / 4), ceil4(rows)] int32, contiguous, padding zero; see `mn_major_view`.

    Raises:
        UnsupportedError: a float32 scale is no power of two from 2**-127 to 2**127, or another
            dtype.
        CheckpointError: `scale` does not have ceil(rows / block_n) rows.
    """
    blocks = -(-rows // block_n)
    if scale.shape[-2] != blocks:
        raise CheckpointError(
            f"{name}: {scale.shape[-2]} scale rows, but {rows} weight rows in blocks of {block_n} "
            f"have {blocks}"
        )
    codes = _exponent_bytes(scale, name).repeat_interleave(block_n, -2)[..., :rows, :]
    words = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % _CODES_PER_WORD))
    return _store_mn_major(words.contiguous().view(torch.int32))


def unpack_ue8m0(
    storage: Tensor,
    rows: int,
    cols: int,
    *,
    block_n: int,
    dtype: torch.dtype,
    name: str = "scale",
) -> Tensor:
    """Inverse of `pack_ue8m0`.

    Args:
        storage: [..., ceil(cols / 4), ceil4(rows)] int32.
        rows: N of the weight.
        cols: C, scales along K.
        block_n: rows that share a scale.
        dtype: that of the packed scales: float32, float8_e8m0fnu or uint8.
        name: what errors call the tensor.

    Returns:
        [..., ceil(rows / block_n), cols] `dtype`, contiguous.

    Raises:
        CheckpointError: the dtype or shape is not that of these extents, the padding is not zero,
            or rows of one block have different scales.
        UnsupportedError: another `dtype`.
    """
    wanted = TensorSpec(dtype=torch.int32, shape=packed_shape(rows, cols))
    padded = _load_mn_major(storage, rows, wanted, name).view(torch.uint8)
    codes = padded[..., :cols]
    if padded[..., cols:].any():
        raise CheckpointError(_not_zero(name))
    scale = codes[..., ::block_n, :].contiguous()
    differs = codes != scale.repeat_interleave(block_n, -2)[..., :rows, :]
    if differs.any():
        row = int(differs.nonzero()[0][-2])
        raise CheckpointError(
            f"{name}: row {row} has other scales than row {row // block_n * block_n}, but rows "
            f"share them in blocks of {block_n}; prepare the checkpoint again"
        )
    if dtype == torch.float32:
        return scale.view(torch.float8_e8m0fnu).float()
    if dtype in (torch.float8_e8m0fnu, torch.uint8):
        return scale.view(dtype)
    raise UnsupportedError(f"{name}: packed UE8M0 holds no {dtype} scales")


def _exponent_bytes(scale: Tensor, name: str) -> Tensor:
    """E8M0 bytes of the scales, uint8 [..., R, C]; exact or refused."""
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        return scale.view(torch.uint8)
    if scale.dtype != torch.float32:
        raise UnsupportedError(f"{name}: packed UE8M0 holds no {scale.dtype} scales")
    codes = scale.to(torch.float8_e8m0fnu)
    inexact = codes.float() != scale
    if inexact.any():
        index = inexact.nonzero()[0].tolist()
        raise UnsupportedError(
            f"{name}: {scale[tuple(index)].item()} at index {index} is not a power of two, which "
            'UE8M0 needs; convert the checkpoint with scale = "power_of_two"'
        )
    return codes.view(torch.uint8)


def _store_mn_major(x: Tensor) -> Tensor:
    """[..., R, C] to [..., C, ceil4(R)], contiguous, padded with zero."""
    *lead, rows, cols = x.shape
    storage = x.new_zeros(*lead, *aligned_shape(rows, cols))
    storage[..., :rows] = x.mT
    return storage


def _load_mn_major(storage: Tensor, rows: int, wanted: TensorSpec, name: str) -> Tensor:
    """Inverse of `_store_mn_major`; `wanted` is the dtype and last two dimensions to check."""
    found = TensorSpec(dtype=storage.dtype, shape=tuple(storage.shape[-2:]))
    if found != wanted:
        raise CheckpointError(
            f"{name}: MN-major storage is {found.dtype} {list(found.shape)}, but {rows} rows need "
            f"{wanted.dtype} {list(wanted.shape)}; prepare the checkpoint again"
        )
    # Bits, not values: -0.0 is not padding.
    if storage[..., rows:].view(torch.int32).any():
        raise CheckpointError(_not_zero(name))
    # clone, where contiguous() would keep the strides of a transposed dimension of extent 1.
    return mn_major_view(storage, rows).clone(memory_format=torch.contiguous_format)


def _not_zero(name: str) -> str:
    return f"{name}: padding of the MN-major layout is not zero; prepare the checkpoint again"
