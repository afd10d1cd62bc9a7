"""What a grouped GEMM of `sm90_fp8_channel_grouped_gemm` is compiled for; needs no package."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = (8, 16, 32, 64, 128)
"""Most rows of a tile: what WGMMA computes at a time, and what registers hold twice."""

WEIGHT_ROWS = 128
"""Weight rows of a unit of work: 64 for each of two warpgroups."""

COLUMNS = 128
"""Columns of a step along K: one row of the 128-byte swizzle, and of what is promoted."""

THREADS = 384
"""A warpgroup that loads and two that multiply."""

_SHARED_LIMIT = 227 * 1024
_MOST_STAGES = 10


@dataclass(frozen=True, kw_only=True)
class GemmVariant:
    """One compiled kernel.

    Attributes:
        tile_rows: one of TILE_ROWS.
        bias: whether there is one, of each weight row, to add.
    """

    tile_rows: int
    bias: bool = False

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a step's weights and rows."""
        return (WEIGHT_ROWS + self.tile_rows) * COLUMNS

    @property
    def stages(self) -> int:
        """Steps in flight: as many as shared memory holds, and no more than hide its latency."""
        room = _SHARED_LIMIT - self._out_bytes
        return min(room // (self.stage_bytes + 2 * 8), _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: stages, output, and two barriers a stage."""
        return self.stages * (self.stage_bytes + 2 * 8) + self._out_bytes

    @property
    def _out_bytes(self) -> int:
        return WEIGHT_ROWS * self.tile_rows * 2


VARIANTS = tuple(
    GemmVariant(tile_rows=rows, bias=bias) for bias in (False, True) for rows in TILE_ROWS
)
