"""Experts in FP4 with activations in FP4, through the grouped GEMM in CuTe DSL, on SM100.

Compiled, never run: there was no SM100 GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moequant.kernels.block_scaled_plan import BlockScaledGemms, BlockScaledPlan, run_batches
from moequant.kernels.cutlass.sm100_fp4_launch import Fp4GroupedGemm
from moequant.kernels.cutlass.sm100_fp4_variant import TILE_ROWS
from moequant.kernels.launch import stream_of
from moequant.kernels.routing import Grouping

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.block_scaled_quantize import BlockScaledRows, ScalePlaces
    from moequant.kernels.cutlass.sm100_fp4_variant import Fp4Variant
    from moequant.kernels.routing import SortedRouting


class Fp4Plan(BlockScaledPlan):
    """See `BlockScaledPlan`.

    Args:
        variant: the format of weights and activations.
        tensors: that format in the layout `stacked`, but scales swizzled 128x4; on a device of
            SM100.
        act_fn: the function between the GEMMs.
        tokens: M, at least 1; M * T at most MAX_PAIRS.
        topk: T, at least 1.
        arena: where buffers come from.
    """

    def __init__(
        self,
        variant: Fp4Variant,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        tokens: int,
        topk: int,
        arena: WorkspaceArena,
    ) -> None:
        super().__init__(
            partial(Fp4Gemms, variant, tensors, act_fn),
            Grouping(experts=tensors["w2_qdata"].shape[0], tile_rows=TILE_ROWS),
            tensors.get("w2_bias"),
            tokens,
            topk,
            arena,
        )


def batched_experts(
    variant: Fp4Variant,
    tensors: Mapping[str, Tensor],
    act_fn: ActFn,
    hidden: Tensor,
    counts: Tensor,
) -> Tensor:
    """See `run_batches`; the other arguments are those of `Fp4Plan`."""
    gemms = partial(Fp4Gemms, variant, tensors, act_fn)
    return run_batches(gemms, tensors.get("w2_bias"), hidden, counts)


class Fp4Gemms(BlockScaledGemms):
    """See `BlockScaledGemms`; `routing` is cut into tiles of TILE_ROWS."""

    def __init__(
        self,
        variant: Fp4Variant,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        rows: int,
        routing: SortedRouting,
        places: ScalePlaces,
        *,
        empty: Callable[..., Tensor],
    ) -> None:
        super().__init__(variant.name, tensors, act_fn, rows, routing, places, empty=empty)
        self.variant = variant
        self._launches: dict[str, Fp4GroupedGemm] = {}

    def multiply(self, weight: str, x: BlockScaledRows, out: Tensor) -> None:
        """See `BlockScaledGemms.multiply`."""
        # Made by the first call, and kept: encoding four TMA descriptors takes the host longer than
        # a launch. Not before, because buffers that only count bytes have no address to encode.
        gemm = self._launches.get(weight)
        if gemm is None:
            gemm = self._launches[weight] = self._launch_of(weight, x, out)
        gemm(stream_of(out.device))

    def _launch_of(self, weight: str, x: BlockScaledRows, out: Tensor) -> Fp4GroupedGemm:
        w, alpha = self.tensors[f"{weight}_qdata"], self.tensors.get(f"{weight}_global_scale")
        return Fp4GroupedGemm(
            self.variant,
            x=x.codes,
            x_scale=x.scale,
            x_factor=x.global_scale,
            w=w,
            w_scale=self.tensors[f"{weight}_scale"],
            alpha=None if alpha is None else alpha.view(w.shape[0], -1),
            tiles=self.routing.tiles,
            tile_count=self.routing.tile_count,
            out=out,
        )
