"""NVFP4 and MXFP4 experts on SM90 with activations in bfloat16.

The first GEMM gathers the hidden states, so that a call is four launches: sort, two GEMMs, reduce.
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
from moequant.kernels.sm90_w4a16.layout import panel_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.kernels.sm90.buffers import Buffers

# Of tiles of more than 64 rows, whose products take most of the time, in proportion to the rows.
# With more classes than these, ptxas waits for each product.
_CLASSES = {
    96: [48, 64, 80, 96],
    128: [48, 64, 80, 96, 112, 128],
    160: [64, 96, 112, 128, 144, 160],
}


class W4a16Tilings(Tilings):
    """Rules from timings on an H200, see docs/kernels.md."""

    name = "nvfp4_bf16"
    version = 1
    rows = (8, 16, 32, 48, 64, 96, 128, 160)
    pair_rows = (96, 128)
    gather_rows = ()
    rows_for_skew = 48

    def _gathers(self, rows: int, pair: bool, topk: int) -> bool:
        return False  # a choice it does not have: it always does


class Mxfp4Bf16Tilings(W4a16Tilings):
    """As `W4a16Tilings`, in tables of its own: decoding differs."""

    name = "mxfp4_bf16"


@dataclass(frozen=True, kw_only=True)
class W4a16GemmConfig(GemmConfig):
    """A GEMM with panels of weights in `format`, nvfp4 or mxfp4."""

    format: str

    path = Path(__file__).with_name("sm90_w4a16_grouped_gemm.cu")
    a_in_registers = True
    x_bytes = 2

    @property
    def classes(self) -> list[int]:
        """See `GemmConfig.classes`."""
        return _CLASSES.get(self.rows) or classes_of(W4a16Tilings.rows, self.rows)

    def _stage_bytes(self) -> int:
        return 2 * panel_bytes(self.format) + self.rows * 128 * self.x_bytes

    def defines(self) -> dict[str, int]:
        """See `GemmConfig.defines`."""
        return {**super().defines(), "NVFP4": int(self.format == "nvfp4")}


@dataclass(frozen=True, kw_only=True, eq=False)
class W4a16Weights(Sm90Weights):
    """Weights of E experts in nvfp4, as `layout.pack` makes them.

    Attributes:
        w13_factor: float32 [E, 2] of gate and up, or [E, 1].
        w2_factor: float32 [E, 1].
    """

    w13_factor: Tensor
    w2_factor: Tensor

    format: ClassVar[str] = "nvfp4"
    family = W4a16Tilings()
    quantizes = False

    def gemm(
        self, common: dict[str, Any], buffers: Buffers, tiling: Tiling
    ) -> tuple[GemmConfig, Callable[[], list[Any]]]:
        """See `Sm90Weights.gemm`."""
        config = W4a16GemmConfig(**common, format=self.format)
        weight, factor = self.w13, self.w13_factor
        if config.act is None:
            weight, factor = self.w2, self.w2_factor
        shape = (panels(config.n_out, gated=config.gated), -(-config.K // 128))
        assert weight.shape[1:] == (*shape, panel_bytes(self.format))
        assert factor.shape[1] == 1 + config.gated
        assert weight.is_contiguous()
        assert factor.is_contiguous()
        return config, lambda: [pointer(weight), pointer(factor)]


class Mxfp4Bf16Weights(W4a16Weights):
    """As `W4a16Weights`, of mxfp4."""

    format = "mxfp4"
    family = Mxfp4Bf16Tilings()
