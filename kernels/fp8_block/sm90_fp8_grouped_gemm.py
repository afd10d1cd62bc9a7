"""What is compiled of sm90_fp8_grouped_gemm.cu."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moequant.kernels.sm90.grouped_gemm import GemmConfig


@dataclass(frozen=True, kw_only=True)
class Fp8GemmConfig(GemmConfig):
    """A GEMM with FP8 blocks; what has an `act` is quantized behind it.

    Attributes:
        extra: rows that a tile of 128 may have beyond: 0 or 16.
        n_real: columns of the output that are not padding.
    """

    extra: int = 0
    n_real: int

    path = Path(__file__).with_suffix(".cu")
    a_in_registers = False

    @property
    def classes(self) -> list[int]:
        """See `GemmConfig.classes`."""
        return [n for n in (8, 16, 32, 64, 128) if n <= self.rows and (n > 8 or self.rows == 8)]

    def _stage_bytes(self) -> int:
        most = self.rows + self.extra
        scales = -(-most * 4 // 128) * 128 + 2 * 4  # of the rows, and of two blocks of weights
        return 256 * 128 + most * 128 + scales

    def _own_bytes(self) -> int:
        # Staging of the output; behind it, the largest values of rows.
        if self.rows == 128:
            return 8 * (1 if self.gated else 2) * 2048
        groups = 1 if self.gated else 2
        return groups * self.rows * 128 + self.rows * 32 if self.act else 0

    def defines(self) -> dict[str, int]:
        """See `GemmConfig.defines`."""
        return {**super().defines(), "EXTRA": self.extra, "N_REAL": self.n_real}
