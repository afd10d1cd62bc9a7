"""What the grouped GEMM of `sm100_fp4_grouped_gemm` is compiled for; needs no package."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 128
"""Most rows of a tile: the rows of one tcgen05 MMA, and of one tile of swizzled scales."""

WEIGHT_ROWS = 128
"""Weight rows of a unit of work: the columns of one tcgen05 MMA."""

STEP = 256
"""Elements of K that one stage holds: 128 bytes of codes, one row of the 128-byte swizzle."""

MMA_K = 64
"""Elements of K that one tcgen05 MMA multiplies."""

THREADS = 192
"""Four warps that store, one that multiplies and one that loads."""

SCALE_TILE_BYTES = 512
"""Scales of 128 rows by 4 groups."""

_SHARED_LIMIT = 227 * 1024
_RESERVED = 1024  # for barriers and the address of tensor memory


@dataclass(frozen=True, kw_only=True)
class Fp4Variant:
    """One compiled kernel; both operands have the same format.

    Attributes:
        name: as in errors and tests.
        group: elements of K that share a scale.
        e4m3_scales: whether scales are E4M3, with global scales beside them; else E8M0 without.
    """

    name: str
    group: int
    e4m3_scales: bool

    @property
    def scale_bytes(self) -> int:
        """Scales of 128 rows and STEP columns: one to a byte."""
        return STEP // self.group // 4 * SCALE_TILE_BYTES

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a step's rows, weights and scales."""
        return (TILE_ROWS + WEIGHT_ROWS) * STEP // 2 + 2 * self.scale_bytes

    @property
    def stages(self) -> int:
        """Steps in flight: as many as shared memory holds."""
        return (_SHARED_LIMIT - _RESERVED) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.stages * self.stage_bytes + _RESERVED


NVFP4 = Fp4Variant(name="nvfp4", group=16, e4m3_scales=True)
MXFP4 = Fp4Variant(name="mxfp4", group=32, e4m3_scales=False)
VARIANTS = (NVFP4, MXFP4)
"""All that there are."""
