"""FP8 experts with one scale a row, through the grouped GEMM in CuTe DSL, on SM90."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moequant.kernels.calls import on, part_tokens
from moequant.kernels.cutlass.act_quantize import act_quantize
from moequant.kernels.cutlass.act_tensor_quantize import ActTensorQuantize
from moequant.kernels.cutlass.batch_tiles import batch_tiles
from moequant.kernels.cutlass.grouped_gemm import CutlassGroupedGemm
from moequant.kernels.cutlass.variant import TILE_ROWS, GemmVariant
from moequant.kernels.fp8_plan import Fp8Plan
from moequant.kernels.kernel_sets import around_gemms
from moequant.kernels.launch import stream_of
from moequant.kernels.routing import TILE_FIELDS, Grouping, likely_tile_rows
from moequant.kernels.sm90.quantize_permute import FEW_PAIRS

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.arena import WorkspaceArena


def kernels_for(experts: int, tokens: int, topk: int) -> Hashable:
    """Equal for calls that run the same kernels, see `PackedExperts.kernels_for`.

    Few tokens are quantized beside the sort, by a kernel that Triton compiles apart for multiples
    of 16 tokens.
    """
    around = around_gemms(tokens, topk)
    tokens = part_tokens(tokens, topk)
    pairs = tokens * topk
    few = pairs <= FEW_PAIRS[0]
    return likely_tile_rows(pairs / experts, TILE_ROWS), few, few and tokens % 16 == 0, around


class CutlassPlan(Fp8Plan):
    """See `Fp8Plan`; of fp8_channel. The GEMMs add biases.

    Args:
        variant: the kernel of both GEMMs; by default that of the tile which most experts fill.
        tensor_scale: see `Fp8Plan`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        tokens: int,
        topk: int,
        arena: WorkspaceArena,
        *,
        variant: GemmVariant | None = None,
        tensor_scale: bool = False,
    ) -> None:
        E = tensors["w2_qdata"].shape[0]
        likely = likely_tile_rows(tokens * topk / E, TILE_ROWS)
        self.variant = variant or GemmVariant(tile_rows=likely)
        grouping = Grouping(experts=E, tile_rows=self.variant.tile_rows)
        super().__init__(
            tensors,
            act_fn,
            tokens,
            topk,
            arena,
            grouping=grouping,
            by_token=True,
            tensor_scale=tensor_scale,
        )
        self._between = None
        if tensor_scale:
            self._between = ActTensorQuantize.allocate(*self.act.shape, empty=arena.empty)
        self._gemms: dict[str, CutlassGroupedGemm] = {}

    def multiply(self, weight: str, x: Tensor, x_scale: Tensor, out: Tensor) -> None:
        """See `Fp8Plan.multiply`."""
        # Made by the first call: a plan that counts bytes has nowhere for a tensor map to point.
        gemm = self._gemms.get(weight)
        if gemm is None:
            tiles, tile_count = self.routing.tiles, self.routing.tile_count
            gemm = gemm_of(self.variant, self.tensors, weight, x, x_scale, tiles, tile_count, out)
            self._gemms[weight] = gemm
        gemm(stream_of(out.device))

    def activate(self) -> None:
        """See `Fp8Plan.activate`."""
        rows = (self.gate_up, self.act, self.act_scale, self.act_fn)
        run = act_quantize if self._between is None else self._between
        run(*rows, row_of_pair=self.routing.row_of_pair)


def batched_experts(
    tensors: Mapping[str, Tensor],
    act_fn: ActFn,
    qdata: Tensor,
    scale: Tensor,
    counts: Tensor,
    *,
    tensor_scale: bool = False,
) -> Tensor:
    """Every expert's result for the first counts[e] of its tokens. Nothing is read on the host.

    Args:
        tensors: fp8_channel in the layout `stacked`, on a device of SM90.
        act_fn: the function between the GEMMs.
        qdata: float8_e4m3fn [E, C, H] contiguous.
        scale: float32 [E, C, 1] contiguous.
        counts: [E] int32; more than C is C.
        tensor_scale: whether what lies between the GEMMs is quantized with one scale of all rows.

    Returns:
        [E, C, H] bfloat16; rows at or beyond counts[e] are anything.
    """
    E, C, H = qdata.shape
    I = tensors["w2_qdata"].shape[2]
    variant = GemmVariant(tile_rows=next((r for r in TILE_ROWS if r >= C), TILE_ROWS[-1]))

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=qdata.device)

    y = empty(E, C, H, dtype=torch.bfloat16)
    if y.numel() == 0:
        return y
    tiles = empty(E * -(-C // variant.tile_rows), TILE_FIELDS, dtype=torch.int32)
    tile_count = empty(1, dtype=torch.int32)
    gate_up = empty(E * C, tensors["w13_qdata"].shape[1], dtype=torch.bfloat16)
    act = empty(E * C, I, dtype=torch.float8_e4m3fn)
    act_scale = empty(E * C, dtype=torch.float32)
    x, x_scale, rows = qdata.view(E * C, H), scale.view(E * C), y.view(E * C, H)
    with on(qdata.device):
        batch_tiles(counts, tiles, tile_count, capacity=C, tile_rows=variant.tile_rows)
        stream = stream_of(qdata.device)
        gemm_of(variant, tensors, "w13", x, x_scale, tiles, tile_count, gate_up)(stream)
        if tensor_scale:
            between = ActTensorQuantize.allocate(E * C, I, empty=empty)
            between(gate_up, act, act_scale, act_fn, row_of_pair=_used_rows(counts, C))
        else:
            act_quantize(gate_up, act, act_scale, act_fn, counts=counts)
        gemm_of(variant, tensors, "w2", act, act_scale, tiles, tile_count, rows)(stream)
    return y


def _used_rows(counts: Tensor, capacity: int) -> Tensor:
    """The rows of batches as of sorted pairs: [E * C] int32, -1 for none."""
    place = torch.arange(capacity, dtype=torch.int32, device=counts.device)
    first = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device) * capacity
    return torch.where(place < counts[:, None], first[:, None] + place, -1).flatten()


def gemm_of(
    variant: GemmVariant,
    tensors: Mapping[str, Tensor],
    weight: str,
    x: Tensor,
    x_scale: Tensor,
    tiles: Tensor,
    tile_count: Tensor,
    out: Tensor,
) -> CutlassGroupedGemm:
    """What multiplies the rows of `tiles` by `weight`, "w13" or "w2".

    Whether there is a bias is not read from `variant`, but from `tensors`.
    """
    bias = tensors.get(f"{weight}_bias")
    return CutlassGroupedGemm(
        replace(variant, bias=bias is not None),
        w=tensors[f"{weight}_qdata"],
        w_scale=tensors[f"{weight}_scale"],
        x=x,
        x_scale=x_scale,
        bias=bias,
        tiles=tiles,
        tile_count=tile_count,
        out=out,
    )
