"""INT4 and MXFP4 experts on SM90 with activations in FP8 per token.

The result of the activation function is rounded to bfloat16 and quantized by a launch of its own:
its scale is that of a whole row, which no unit of work of the first GEMM knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moequant.kernels.cuda_driver import pointer
from moequant.kernels.sm90.grouped_gemm import GemmConfig, classes_of
from moequant.kernels.sm90.panels import panels
from moequant.kernels.sm90.tiling import Tiling, Tilings
from moequant.kernels.sm90.weights import Sm90Weights
from moequant.kernels.sm90_w4a8 import int4_layout, mxfp4_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from moequant.kernels.sm90.buffers import Buffers


_PANEL_BYTES = {"w4a8": int4_layout.PANEL_BYTES, "mxfp4": mxfp4_layout.PANEL_BYTES}


class W4a8Tilings(Tilings):
    """Rules from timings on an H200 and an H100, see docs/kernels.md."""

    name = "w4a8"
    version = 1
    rows: ClassVar[tuple[int, ...]] = (8, 16, 32, 48, 64, 96, 128)
    pair_rows: ClassVar[tuple[int, ...]] = (96, 128)
    gather_rows: ClassVar[tuple[int, ...]] = (48, 64, 96, 128)
    rows_for_skew = 96

    def _gathers(self, rows: int, pair: bool, topk: int) -> bool:
        # It took up to 3 % less time with 8 experts a token, and 2 to 5 % more with 2 (an H100).
        return rows in self.gather_rows and topk > 4


class Mxfp4Fp8Tilings(W4a8Tilings):
    """As `W4a8Tilings`, in tables of its own: decoding takes longer, and tiles may be larger."""

    name = "mxfp4_fp8"
    rows = (8, 16, 32, 48, 64, 96, 128, 160, 176)


class Mxfp4GroupScaledTilings(W4a8Tilings):
    """As `W4a8Tilings`, untimed, and without the tiles for which registers do not suffice."""

    name = "mxfp4_fp8_group_scaled"
    rows = (8, 16, 32, 48, 64, 96)
    pair_rows = (96,)
    gather_rows = (48, 64, 96)
    rows_for_skew = 48


@dataclass(frozen=True, kw_only=True)
class W4a8GemmConfig(GemmConfig):
    """A GEMM with panels of weights in `format`, w4a8 or mxfp4."""

    format: str
    path = Path(__file__).with_name("sm90_w4a8_grouped_gemm.cu")
    a_in_registers = True

    @property
    def classes(self) -> list[int]:
        """See `GemmConfig.classes`."""
        return classes_of(Mxfp4Fp8Tilings.rows, self.rows)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        return _PANEL_BYTES[self.format]

    def _stage_bytes(self) -> int:
        return 2 * self.panel_bytes + self.rows * 128

    def defines(self) -> dict[str, int]:
        """See `GemmConfig.defines`."""
        return {**super().defines(), "MXFP4": int(self.format == "mxfp4")}


class Mxfp4GroupScaledGemmConfig(W4a8GemmConfig):
    """A GEMM with panels of `mxfp4_group_scaled_layout`, which have the same sizes."""

    path = Path(__file__).with_name("sm90_mxfp4_group_scaled_grouped_gemm.cu")


@dataclass(frozen=True, kw_only=True, eq=False)
class W4a8Weights(Sm90Weights):
    """Weights of E experts in w4a8, as the `pack` of its layout makes them.

    `w13` is uint8 [E, panels, ceil(H / 128), PANEL_BYTES], `w2` [E, panels, ceil(I / 128),
    PANEL_BYTES].
    """

    format: ClassVar[str] = "w4a8"
    gemm_config: ClassVar[type[W4a8GemmConfig]] = W4a8GemmConfig
    family = W4a8Tilings()
    quantizes_apart = True

    def gemm(
        self, common: dict[str, Any], buffers: Buffers, tiling: Tiling
    ) -> tuple[GemmConfig, Callable[[], list[Any]]]:
        """See `Sm90Weights.gemm`."""
        config = self.gemm_config(**common, format=self.format)
        weight = self.w2 if config.act is None else self.w13
        blocks = -(-config.K // 128)
        shape = (panels(config.n_out, gated=config.gated), blocks, config.panel_bytes)
        assert weight.shape[1:] == shape
        assert weight.is_contiguous()
        return config, lambda: [pointer(weight)]


class Mxfp4Fp8Weights(W4a8Weights):
    """As `W4a8Weights`, of mxfp4."""

    format = "mxfp4"
    family = Mxfp4Fp8Tilings()


class Mxfp4GroupScaledWeights(W4a8Weights):
    """As `W4a8Weights`, of mxfp4 whose groups keep their scales."""

    format = "mxfp4"
    gemm_config = Mxfp4GroupScaledGemmConfig
    family = Mxfp4GroupScaledTilings()
