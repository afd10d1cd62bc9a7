"""The scale layout of DeepGEMM on SM100: UE8M0, MN-major, packed four to an int32.

Scales are transposed, and each column is padded to 16 bytes (4 elements) for TMA. With R rows of a
weight, C scales along K, and Rp = ceil4(R):

    storage int32 [..., ceil(C / 4), Rp]   byte i of storage[j, r] is the exponent byte
                                           of scale[r // block_n, 4 * j + i]

Little-endian, byte 0 the lowest. SM100 reads one scale per row, so the rows of a block repeat its
scale. Padding, of rows and of the last int32, is zero: DeepGEMM zeroes the latter and leaves the
former unspecified, and files must be the same bytes every time.

`storage` is what files hold and what moves between devices; `mn_major_view` turns it into what
DeepGEMM takes, [..., R, columns] with strides (1, Rp). Take the view last: `Tensor.to` and `clone`
drop the padding of a padded view.

Source: DeepGEMM 54e2261, `csrc/apis/layout.hpp`, `csrc/utils/layout.hpp`, `smxx_layout.hpp`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moequant.errors import CheckpointError, UnsupportedError
from moequant.layouts.arguments import check_extents, check_matrices

_TMA_ROWS = 4
_CODES_PER_WORD = 4


def packed_shape(rows: int, cols: int) -> tuple[int, int]:
    """Last two dimensions of the storage for `rows` weight rows and `cols` scales along K."""
    return -(-cols // _CODES_PER_WORD), -(-rows // _TMA_ROWS) * _TMA_ROWS


def mn_major_view(storage: Tensor, rows: int) -> Tensor:
    """What DeepGEMM takes: [..., rows, columns] over `storage`, strides (1, ceil4(rows)), no copy.

    Args:
        storage: [..., columns, ceil4(rows)] contiguous, from `pack_ue8m0`.
        rows: R, without padding.

    Raises:
        UnsupportedError: `storage` is not int32 of so many rows, as `pack_ue8m0` makes it.
    """
    check_extents(rows=rows)
    _, padded_rows = packed_shape(rows, 0)
    wanted = f"[..., columns, {padded_rows}]"
    check_matrices("storage", storage, wanted)
    if (storage.dtype, storage.shape[-1]) != (torch.int32, padded_rows):
        raise UnsupportedError(
            f"storage is {storage.dtype} {list(storage.shape)}, but {rows} rows need torch.int32 "
            f"{wanted}; give what pack_ue8m0 makes of their scales"
        )
    return storage.mT[..., :rows, :]


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
        UnsupportedError: a float32 scale is no power of two from 2**-127 to 2**127, another dtype,
            or an argument that is not as above.
        CheckpointError: `scale` does not have ceil(rows / block_n) rows.
    """
    check_extents(rows=rows)
    check_extents(1, block_n=block_n)
    check_matrices(name, scale, "[..., ceil(rows / block_n), C]")
    blocks = -(-rows // block_n)
    if scale.shape[-2] != blocks:
        raise CheckpointError(
            f"{name}: {scale.shape[-2]} scale rows, but {rows} weight rows in blocks of {block_n} "
            f"have {blocks}"
        )
    codes = _exponent_bytes(scale, name).repeat_interleave(block_n, -2)[..., :rows, :]
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % _CODES_PER_WORD))
    words = padded.contiguous().view(torch.int32)
    storage = words.new_zeros(*scale.shape[:-2], *packed_shape(rows, scale.shape[-1]))
    storage[..., :rows] = words.mT
    return storage


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
        UnsupportedError: another `dtype`, or an argument that is not as above.
    """
    check_extents(rows=rows, cols=cols)
    check_extents(1, block_n=block_n)
    check_matrices(name, storage, "[..., ceil(cols / 4), ceil4(rows)]")
    expected, found = packed_shape(rows, cols), tuple(storage.shape[-2:])
    if (storage.dtype, found) != (torch.int32, expected):
        raise CheckpointError(
            f"{name}: MN-major storage is {storage.dtype} {list(found)}, but {rows} rows need "
            f"torch.int32 {list(expected)}; prepare the checkpoint again"
        )
    # clone, where contiguous() would keep the strides of a transposed dimension of extent 1.
    words = mn_major_view(storage, rows).clone(memory_format=torch.contiguous_format)
    padded = words.view(torch.uint8)
    codes = padded[..., :cols]
    if storage[..., rows:].any() or padded[..., cols:].any():
        raise CheckpointError(
            f"{name}: padding of the MN-major layout is not zero; prepare the checkpoint again"
        )
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
    raise UnsupportedError(f"{name}: packed UE8M0 cannot hold {dtype} scales")


def _exponent_bytes(scale: Tensor, name: str) -> Tensor:
    """E8M0 bytes of the scales, uint8 [..., R, C]; exact or refused."""
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        return scale.view(torch.uint8)
    if scale.dtype != torch.float32:
        raise UnsupportedError(f"{name}: packed UE8M0 cannot hold {scale.dtype} scales")
    codes = scale.to(torch.float8_e8m0fnu)
    inexact = codes.float() != scale
    if inexact.any():
        index = inexact.nonzero()[0].tolist()
        raise UnsupportedError(
            f"{name}: {scale[tuple(index)].item()} at index {index} is not a power of two, which "
            'UE8M0 needs; convert the checkpoint with scale = "power_of_two"'
        )
    return codes.view(torch.uint8)
