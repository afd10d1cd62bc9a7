"""What is compiled of sm90_w4a8_grouped_gemm.cu."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moequant.kernels.sm90.grouped_gemm import GemmConfig
from moequant.kernels.sm90_w4a8.layout import PANEL_BYTES

_CLASSES = (8, 16, 32, 48, 64, 96, 128)


@dataclass(frozen=True, kw_only=True)
class W4a8GemmConfig(GemmConfig):
    """A GEMM with INT4 panels."""

    path = Path(__file__).with_suffix(".cu")
    a_in_registers = True

    @property
    def classes(self) -> list[int]:
        """See `GemmConfig.classes`."""
        least = 8 if self.rows <= 32 else 16
        return [n for n in _CLASSES if least <= n <= self.rows]

    def _stage_bytes(self) -> int:
        return 2 * PANEL_BYTES + self.rows * 128
