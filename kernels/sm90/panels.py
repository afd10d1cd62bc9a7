"""Which rows of a weight lie where in the panels that panels.cuh reads.

A panel is what a warpgroup reads of a stage: 128 weight rows x 128 columns, codes, then scales. Its
rows are two blocks of 64, the M of WGMMA: for gate and up, 64 rows of either; else 128 in order.
Within a block, warp w has 16 rows, of which a thread holds f = lane / 4 and f + 8.

Which row of the weight that is makes what a thread writes of one token contiguous: with
f = 2 * a + b, of gate and up, row 16 * warp + 4 * a + 2 * half + b of 64; else row
32 * warp + 8 * a + 4 * block + 2 * half + b of 128. half is 1 for f + 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.kernels.sm90.panel_words import CODE_BYTES, PANEL_COLUMNS, PANEL_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moequant.kernels.sm90.panel_words import PanelWords

_BATCH_BYTES = {"cpu": 0, "cuda": 16 << 20}
"""Of panels that are made at once, at least those of an expert. What is made on the way is several
times as large, and a CPU's caches should hold it; a GPU does small tensors faster than the host can
ask for them."""


def panels(n_out: int, *, gated: bool) -> int:
    """Panels along the rows of a weight with `n_out` output columns, the last perhaps half full."""
    return -(-n_out // (PANEL_ROWS // 2 if gated else PANEL_ROWS))


def pack_panels(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    words: PanelWords,
) -> Tensor:
    """Codes and scales in panels, of one weight, or of gate and up together.

    Args:
        codes: of each weight, uint8 [E, N, blocks * 64] for blocks of 128 columns.
        scales: of each weight, [E, N, blocks, groups].
        words: how codes lie in a panel.

    Returns:
        [E, panels, blocks, CODE_BYTES + PANEL_ROWS * groups * itemsize] uint8. The scales lie as
        [warp 4][f 8][block 2][half 2][group].
    """
    codes_by_row, scales_by_row = rows_of_panels(*codes), rows_of_panels(*scales)
    E, P, *_, blocks, groups = scales_by_row.shape
    scale_bytes = PANEL_ROWS * groups * scales_by_row.dtype.itemsize
    packed = codes_by_row.new_empty(E, P, blocks, CODE_BYTES + scale_bytes)
    for some in _batches(packed):
        to = packed[some].flatten(0, 1)
        words.pack(codes_by_row[some].flatten(0, 1).contiguous(), to)
        # From [P, block, warp, a, half, b, K / 128, group].
        scale = scales_by_row[some].flatten(0, 1).permute(0, 6, 2, 3, 5, 1, 4, 7)
        to[..., CODE_BYTES:] = scale.reshape(len(to), blocks, -1).view(torch.uint8)
    return packed


def unpack_panels(
    packed: Tensor,
    n_out: int,
    scale_dtype: torch.dtype,
    unpack_codes: Callable[[Tensor], Tensor],
    *,
    gated: bool,
) -> list[tuple[Tensor, Tensor]]:
    """The inverse of `pack_panels`: its codes [E, n_out, ...] and its scales [E, n_out, ...].

    Args:
        packed: [E, panels, blocks, panel bytes] uint8.
        n_out: rows of the weight, or of gate and of up each.
        scale_dtype: dtype of the scales.
        unpack_codes: from uint8 [P, blocks, CODE_BYTES] of P panels to codes
            [P, block, warp, a, half, b, blocks * 64], the inverse of `PanelWords.pack`.
        gated: whether the panels hold gate and up.

    Returns:
        Those of the weight, or those of gate and then those of up.
    """
    E, P, blocks, size = packed.shape
    groups = (size - CODE_BYTES) // (PANEL_ROWS * scale_dtype.itemsize)
    sizes = (E, P, 2, 4, 4, 2, 2)  # expert, panel, block, warp, a, half, b
    codes = packed.new_empty(*sizes, blocks * PANEL_COLUMNS // 2)
    scales = packed.new_empty(*sizes, blocks, groups, dtype=scale_dtype)
    for some in _batches(packed):
        of_batch = packed[some].flatten(0, 1)
        codes[some].flatten(0, 1)[:] = unpack_codes(of_batch[..., :CODE_BYTES])
        # From [P, K / 128, warp, a, b, block, half, group].
        scale = of_batch[..., CODE_BYTES:].contiguous().view(scale_dtype)
        scale = scale.view(len(of_batch), blocks, 4, 4, 2, 2, 2, groups)
        scales[some].flatten(0, 1)[:] = scale.permute(0, 5, 2, 3, 6, 4, 1, 7)
    parts = (rows_of_weights(t, n_out, gated=gated) for t in (codes, scales))
    return list(zip(*parts, strict=True))


def _batches(packed: Tensor) -> Iterator[slice]:
    """Experts that are packed or unpacked at once."""
    most = _BATCH_BYTES.get(packed.device.type, 0)
    experts = max(most * len(packed) // max(packed.nbytes, 1), 1)
    for first in range(0, len(packed), experts):
        yield slice(first, first + experts)


def whole_blocks(x: Tensor, size: int) -> Tensor:
    """[E, N, columns] with zeros behind the last column, up to a multiple of `size`."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size))


def rows_of_panels(x: Tensor, up: Tensor | None = None) -> Tensor:
    """[E, N, ...] as [E, panels, block, warp, a, half, b, ...], with rows of 0 behind the last."""
    E, N, *rest = x.shape
    P = panels(N, gated=up is not None)
    if up is None:
        rows = _padded(x, P * PANEL_ROWS).view(E, P, 4, 4, 2, 2, 2, *rest)
        return rows.movedim(4, 2)  # was [E, P, warp, a, block, half, b]
    halves = [_padded(part, P * PANEL_ROWS // 2) for part in (x, up)]
    return torch.stack(halves, 1).view(E, 2, P, 4, 4, 2, 2, *rest).movedim(2, 1)


def rows_of_weights(x: Tensor, n_out: int, *, gated: bool) -> list[Tensor]:
    """The inverse of `rows_of_panels`, a tensor of each weight."""
    E, P, _, _, _, _, _, *rest = x.shape
    if gated:
        halves = x.movedim(1, 2).reshape(E, 2, P * PANEL_ROWS // 2, *rest)
    else:
        halves = x.movedim(2, 4).reshape(E, 1, P * PANEL_ROWS, *rest)
    return [half[:, :n_out].contiguous() for half in halves.unbind(1)]


def _padded(x: Tensor, rows: int) -> Tensor:
    """[E, N, ...] with rows of 0 behind the last, `rows` in all."""
    if x.shape[1] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(x.shape[0], rows - x.shape[1], *x.shape[2:])], 1)
