"""w4a8 as the SM90 CUTLASS kernel for INT4 x FP8 reads it.

| tensor | shape | what |
|---|---|---|
| `qdata` | [..., N, K/8] int32 | codes, encoded and reordered |
| `scale_table` | [..., K/128, N, 8] float8_e4m3fn | entry i: e4m3((i - 8) * group_scale) |
| `row_scale` | [..., N] float32 | multiplies the row of the output |
| `packed_layout` | [..., 3] int32 | (N/16, K/32, 32 N): what varies of the kernel's CuTe layout |

The kernel looks weights up, it does not multiply: the low three bits of an encoded code choose a
table entry, bit 3 says whether its (negative) value is meant or the negated one. What it computes
with is therefore `formats.effective_weight`, exactly.

To split K over ranks, pack whole rows and cut afterwards, so that every rank keeps the row scale
that the scales were chosen for: tiles of 32 columns are outermost in `qdata`, as groups are in
`scale_table`, and a range of K is one run of the bytes of each matrix.

Source: vLLM 0.33.0, `fused_moe/oracle/w4a8.py` and its CUDA operators `cutlass_encode_and_reorder_
int4b_grouped` and `cutlass_pack_scale_fp8`; the order was checked against CUTLASS's compiled
`compute_memory_reordering_atom`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.errors import UnsupportedError
from moequant.formats.base import QuantizedWeight, TensorSpec, check_tensors
from moequant.formats.elements import encode_e4m3, pack_nibbles, unpack_nibbles
from moequant.formats.w4a8 import GROUP, W4A8, join_scale, split_scale

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = 1

TABLE_ENTRIES = 8
_N_MULTIPLE, _K_MULTIPLE = 16, 256


def table_code(code: Tensor) -> Tensor:
    """Two's complement nibbles, uint8 0..15 [...], to table index and sign: 1..7 become 7..1.

    Its own inverse.
    """
    return torch.where(code < 8, (8 - code) & 7, code)


def reorder(qdata: Tensor) -> Tensor:
    """Order codes so that a thread's share of a 16 x 32 tile is contiguous.

    Code (n, k) of a matrix goes to place 512 * (n // 16) + 32 * N * (k // 32) + 64 * (n % 8)
    + 16 * (k // 4 % 4) + 8 * (k // 16 % 2) + 4 * (n // 8 % 2) + k % 4. Runs of four codes, two
    bytes, stay together.

    Args:
        qdata: [..., N, K/2] uint8, two codes a byte; N a multiple of 16, K of 32.

    Returns:
        [..., N, K/2] uint8, each matrix on its own.
    """
    *lead, N, storage_k = qdata.shape
    runs = qdata.contiguous().view(torch.int16)
    # [n // 16, n // 8 % 2, n % 8, k // 32, k // 16 % 2, k // 4 % 4]
    tiles = runs.reshape(*lead, N // 16, 2, 8, storage_k // 16, 2, 4)
    ordered = _permute_matrix(tiles, (3, 0, 2, 5, 4, 1)).reshape(*lead, N, storage_k // 2)
    return ordered.view(torch.uint8)


def restore(qdata: Tensor) -> Tensor:
    """Inverse of `reorder`: [..., N, K/2] uint8 to the same shape."""
    *lead, N, storage_k = qdata.shape
    runs = qdata.contiguous().view(torch.int16)
    # [k // 32, n // 16, n % 8, k // 4 % 4, k // 16 % 2, n // 8 % 2]
    tiles = runs.reshape(*lead, storage_k // 16, N // 16, 8, 4, 2, 2)
    rows = _permute_matrix(tiles, (1, 5, 2, 0, 4, 3)).reshape(*lead, N, storage_k // 2)
    return rows.view(torch.uint8)


def pack_scales(scale: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Split scales as vLLM's loader does and tabulate every group's multiples.

    Args:
        scale: [..., N, K/128] bfloat16.
        name: what errors call the weight.

    Returns:
        scale_table [..., K/128, N, 8] float8_e4m3fn; row_scale [..., N] float32.

    Raises:
        UnsupportedError: the split would change a scale. It changes none of moequant's.
    """
    group_scale, row_scale = split_scale(scale)
    changed = join_scale(group_scale, row_scale) != scale
    if changed.any():
        raise UnsupportedError(
            f"{name}: {int(changed.sum())} of {scale.numel()} scales are not an E4M3 multiple of "
            "their row's, so that this layout would change them; convert the source checkpoint "
            "with moequant, or run these experts from the portable files"
        )
    multiples = torch.arange(-TABLE_ENTRIES, 0, dtype=torch.float32, device=scale.device)
    table = group_scale.float().mT.unsqueeze(-1) * multiples
    return encode_e4m3(table).contiguous(), row_scale


def unpack_scales(scale_table: Tensor, row_scale: Tensor) -> Tensor:
    """Inverse of `pack_scales`: [..., N, K/128] bfloat16.

    Exact: the last entry of a group is its scale negated, and `join_scale` is how the scale was
    made.
    """
    return join_scale(-scale_table[..., -1].float().mT, row_scale).contiguous()


def specs(shape: Sequence[int], name: str = "weight") -> dict[str, TensorSpec]:
    """What `pack_w4a8` makes of a weight of `shape` [..., N, K].

    Raises:
        UnsupportedError: K is not a multiple of 256, or N not of 16.
    """
    *lead, N, K = shape
    for axis, extent, multiple in (("N", N, _N_MULTIPLE), ("K", K, _K_MULTIPLE)):
        if extent % multiple:
            raise UnsupportedError(
                f"{name}: {axis} = {extent} is not a multiple of {multiple}, which the CUTLASS "
                "W4A8 kernel needs; run these experts from the portable files"
            )
    return {
        "qdata": TensorSpec(dtype=torch.int32, shape=(*lead, N, K // 8)),
        "scale_table": TensorSpec(
            dtype=torch.float8_e4m3fn, shape=(*lead, K // GROUP, N, TABLE_ENTRIES)
        ),
        "row_scale": TensorSpec(dtype=torch.float32, shape=(*lead, N)),
        "packed_layout": TensorSpec(dtype=torch.int32, shape=(*lead, 3)),
    }


def pack_w4a8(q: QuantizedWeight, name: str = "weight") -> dict[str, Tensor]:
    """The tensors of `specs` for a w4a8 weight [..., N, K].

    Raises:
        UnsupportedError: another format, a shape the kernel cannot take, or scales that
            `pack_scales` refuses.
    """
    if q.format != W4A8.name:
        raise UnsupportedError(f"{name}: the CUTLASS W4A8 layout holds w4a8, not {q.format}")
    lead, (N, K) = q.shape[:-2], q.shape[-2:]
    layout = specs(q.shape, name)["packed_layout"]
    scale_table, row_scale = pack_scales(q.scale, name)
    encoded = pack_nibbles(table_code(unpack_nibbles(q.qdata)))
    extents = (N // 16, K // 32, 32 * N)
    return {
        "qdata": reorder(encoded).view(torch.int32),
        "scale_table": scale_table,
        "row_scale": row_scale,
        "packed_layout": torch.tensor(extents, dtype=layout.dtype, device=q.qdata.device)
        .expand(*lead, 3)
        .contiguous(),
    }


def unpack_w4a8(
    tensors: Mapping[str, Tensor], shape: Sequence[int], name: str = "weight"
) -> QuantizedWeight:
    """Inverse of `pack_w4a8`: the w4a8 weight of `shape` [..., N, K], bit for bit.

    Raises:
        CheckpointError: a tensor is missing, one too many, or not what `specs` says.
        UnsupportedError: as `specs`.
    """
    check_tensors(tensors, specs(shape, name), name)
    encoded = restore(tensors["qdata"].contiguous().view(torch.uint8))
    return QuantizedWeight(
        format=W4A8.name,
        qdata=pack_nibbles(table_code(unpack_nibbles(encoded))),
        scale=unpack_scales(tensors["scale_table"], tensors["row_scale"]),
        global_scale=None,
        shape=torch.Size(shape),
    )


def _permute_matrix(tiles: Tensor, order: Sequence[int]) -> Tensor:
    """Permute the last axes, as many as `order` has; those before them stay."""
    lead = tiles.ndim - len(order)
    return tiles.permute(*range(lead), *(lead + axis for axis in order))
