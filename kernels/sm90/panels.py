"""Which rows of a weight lie where in the panels that panels.cuh reads.

A panel is what a warpgroup reads of a stage: 128 weight rows x 128 columns, codes first. Its rows
are two blocks of 64, the M of WGMMA: for gate and up, 64 rows of either; else 128 rows in order.
Within a block, warp w has 16 rows, of which a thread holds f = lane / 4 and f + 8.

Which row of the weight that is makes what a thread writes of one token contiguous: with
f = 2 * a + b, of gate and up, row 16 * warp + 4 * a + 2 * half + b of 64; else row
32 * warp + 8 * a + 4 * block + 2 * half + b of 128. half is 1 for f + 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL_ROWS = 128
PANEL_COLUMNS = 128
CODE_BYTES = PANEL_ROWS * PANEL_COLUMNS // 2


def panels(n_out: int, *, gated: bool) -> int:
    """Panels along the rows of a weight with `n_out` output columns, the last perhaps half full."""
    return -(-n_out // (PANEL_ROWS // 2 if gated else PANEL_ROWS))


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
    E, P, *_, columns = x.shape
    if gated:
        halves = x.movedim(1, 2).reshape(E, 2, P * PANEL_ROWS // 2, columns)
    else:
        halves = x.movedim(2, 4).reshape(E, 1, P * PANEL_ROWS, columns)
    return [half[:, :n_out].contiguous() for half in halves.unbind(1)]


def _padded(x: Tensor, rows: int) -> Tensor:
    """[E, N, ...] with rows of 0 behind the last, `rows` in all."""
    if x.shape[1] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(x.shape[0], rows - x.shape[1], *x.shape[2:])], 1)
