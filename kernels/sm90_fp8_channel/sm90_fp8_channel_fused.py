"""FP8 experts on SM90: a scale per weight row or matrix, activations in FP8 per token.

As in sm90_w4a8, the result of the activation function is rounded to bfloat16 and quantized by a
launch of its own.

Weights are read as they are on disk, by tensor maps that bring rows in the order of the epilogue.
Packed panels, as four-bit weights have them, would save nothing: no code is decoded, and panels
hold padding, 3 % of a layer with sizes of 2880.

Error of the sums. Hopper's tensor cores keep about 14 bits (DeepSeek-V3 report, section 3.3.2): of
the 32 products and the sum so far, which an instruction adds, each is cut below 2**-13 of the
largest. The largest is mostly the sum so far, which grows as the square root of the columns in it,
as does the number of cuts: so the error relative to the result grows as the square root of the
columns that stay in the tensor cores. By that model, for normal weights and activations
(test_fp8_channel.py), it is 1.3e-4 where float32 takes over every 128 columns, 2.1e-4 with 256,
3.6e-4 with 512, and 2.0e-3 with all of K = 7168. It is 128 here, as in the other FP8 kernels, in
units of up to 128 rows: with 256, calls took from 2 % less to 2 % more (docs/kernels.md). Units of
more rows have registers for one set of sums, and it is all of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moequant.kernels.cuda_driver import pointer, tensor_map
from moequant.kernels.sm90.grouped_gemm import GemmConfig, classes_of
from moequant.kernels.sm90.weights import Sm90Weights
from moequant.kernels.sm90_fp8_block.sm90_fp8_block_fused import Fp8BlockTilings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.kernels.sm90.buffers import Buffers
    from moequant.kernels.sm90.tiling import Tiling

_GROUPS = 8
"""Groups of rows of a unit, of which either block has 16 rows; see `rows_by_block`."""


class Fp8ChannelTilings(Fp8BlockTilings):
    """The splits of FP8 blocks, which are as many bytes."""

    name = "fp8_channel"
    version = 1
    rows = (8, 16, 32, 48, 64, 96, 128, 160, 192)
    pair_rows = (96, 128, 192)
    gather_rows = (48, 64, 96, 128)

    def _gathers(self, rows: int, pair: bool, topk: int) -> bool:
        # From other families: gathering was faster for W4A8 with tiles of 48 and 64 rows, and for
        # FP8 blocks with pairs.
        return rows in (48, 64) or (pair and rows <= 128)


@dataclass(frozen=True, kw_only=True)
class Fp8ChannelGemmConfig(GemmConfig):
    """A GEMM with E4M3 weights as they are on disk.

    Attributes:
        per_matrix: whether weights have a scale per matrix instead of per row.
    """

    per_matrix: bool = False

    path = Path(__file__).with_name("sm90_fp8_channel_grouped_gemm.cu")
    a_in_registers = False

    @property
    def classes(self) -> list[int]:
        """See `GemmConfig.classes`."""
        return classes_of(Fp8ChannelTilings.rows, self.rows)

    @property
    def tail_groups(self) -> int:
        """Groups of rows of the last unit along n; 0 if it has all of them."""
        group = _group_rows(gated=self.gated)
        return -(-(self.n_out % (_GROUPS * group)) // group)

    def _stage_bytes(self) -> int:
        return 256 * 128 + self.rows * 128

    def defines(self) -> dict[str, int]:
        """See `GemmConfig.defines`."""
        return {
            **super().defines(),
            "PER_MATRIX": int(self.per_matrix),
            "TAIL_GROUPS": self.tail_groups,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8ChannelWeights(Sm90Weights):
    """Weights of E experts as they are on disk, gate over up.

    `w13` is float8_e4m3fn [E, 2 * I, H], or [E, I, H] where there is no gate; `w2` is [E, H, I]. H
    is a multiple of 32; I is one of 16, and without a gate of 32.

    Attributes:
        w13_scale: float32 [E, 2 * I, 1] of rows, or [E, 2, 1] of gate and up; half as many where
            there is no gate.
        w2_scale: float32 [E, H, 1] or [E, 1, 1].
    """

    w13_scale: Tensor
    w2_scale: Tensor

    family = Fp8ChannelTilings()
    quantizes_apart = True

    def gemm(
        self, common: dict[str, Any], buffers: Buffers, tiling: Tiling
    ) -> tuple[GemmConfig, Callable[[], list[Any]]]:
        """See `Sm90Weights.gemm`."""
        weight, scale = self.w13, self.w13_scale
        if common["act"] is None:
            weight, scale = self.w2, self.w2_scale
        config = Fp8ChannelGemmConfig(**common, per_matrix=scale.shape[1] != weight.shape[1])
        matrices = 1 + config.gated
        assert weight.shape[1:] == (config.w_rows, config.K)
        assert scale.shape[1:] == (matrices if config.per_matrix else config.w_rows, 1)
        assert weight.is_contiguous()
        assert scale.is_contiguous()

        def own() -> list[Any]:
            rows = rows_by_block(weight.view(torch.uint8).flatten(0, 1), gated=config.gated)
            boxes = (_GROUPS, config.tail_groups or _GROUPS)
            maps = (tensor_map(rows, box=(groups, 2, 4, 2, 128)) for groups in boxes)
            return [*maps, pointer(scale)]

        return config, own


def rows_by_block(rows: Tensor, *, gated: bool) -> Tensor:
    """[R, K] as a view [R / group, halves, 4, 2, K], in the order in which WGMMA wants the rows.

    A group is what a warp has along the rows of the output: 16 rows of gate and 16 of up, or 32
    rows of a single weight. `weight_row` in bf16_output.cuh says which of these a thread holds. A
    box of [8, 2, 4, 2, 128] is the 128 rows of a block for two warpgroups of four warps. Of a
    single weight there are four `halves`, of which a box has two: block 0 or block 1.
    """
    group = _group_rows(gated=gated)
    halves = group // 8
    R, K = rows.shape
    return rows.view(R // group, 4, halves, 2, K).transpose(1, 2)


def _group_rows(*, gated: bool) -> int:
    return 16 if gated else 32
