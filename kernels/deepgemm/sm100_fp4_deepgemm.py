"""Experts in MXFP4 with activations in MXFP8, through DeepGEMM's FP8 by FP4 GEMMs, on SM100.

What DeepGEMM multiplies, K being a multiple of 128, so that a row of codes is whole boxes of TMA:

    rows     float8_e4m3fn [R, K], or [E, C, K] of batches
    weights  E2M1, two a byte, the even column low: int8 [E, N, K / 2]
    scales   of both, E8M0 of 32 columns, four to an int32: `moequant.layouts.deepgemm_scale`
    result   bfloat16

Each expert's rows start at a multiple of DeepGEMM's alignment, and it is told where they end; or
they come in batches of a multiple of it, with counts. The alignment is read, and left as it is.

Never run: there was no SM100 GPU. Source: DeepGEMM 54e2261, `csrc/apis/gemm.hpp` for what is
checked of a call, `csrc/jit_kernels/impls/runtime_utils.hpp` for K, and
`csrc/jit_kernels/heuristics/sm100.hpp` for tiles of as many rows as the alignment, masked or not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.kernels.block_scaled_plan import BlockScaledGemms, BlockScaledPlan, run_batches
from moequant.kernels.deepgemm.library import library, row_alignment
from moequant.kernels.routing import Grouping

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.block_scaled_quantize import BlockScaledRows, ScalePlaces
    from moequant.kernels.routing import SortedRouting

_SCHEME = "mxfp8"
_RECIPE = (1, 32)
"""Rows and columns that share a scale, of both operands."""


class DeepGemmFp4Plan(BlockScaledPlan):
    """See `BlockScaledPlan`.

    Args:
        tensors: MXFP4 in the layout `stacked`, but scales packed, `w13_scale` int32 [E, H / 128,
            rows of w13] and `w2_scale` likewise; on a device of SM100.
        act_fn: the function between the GEMMs.
        alignment: DeepGEMM's, which every call must find.
        tokens: M, at least 1; M * T at most MAX_PAIRS.
        topk: T, at least 1.
        arena: where buffers come from.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        alignment: int,
        tokens: int,
        topk: int,
        arena: WorkspaceArena,
    ) -> None:
        E = tensors["w2_qdata"].shape[0]
        super().__init__(
            partial(ContiguousGemms, tensors, act_fn, alignment),
            Grouping(experts=E, tile_rows=alignment, alignment=alignment),
            tensors.get("w2_bias"),
            tokens,
            topk,
            arena,
        )


def batched_experts(
    tensors: Mapping[str, Tensor], act_fn: ActFn, hidden: Tensor, counts: Tensor
) -> Tensor:
    """Every expert's result for the first counts[e] of its tokens. Nothing is read on the host.

    Args:
        tensors: as for `DeepGemmFp4Plan`.
        act_fn: the function between the GEMMs.
        hidden: [E, C, H] contiguous bfloat16, float16 or float32.
        counts: [E] int32 contiguous, from 0 to C.

    Returns:
        [E, C, H] bfloat16, or float32 where down has biases; rows at or beyond counts[e] are
        anything.
    """
    C, alignment = hidden.shape[1], row_alignment()
    if C % alignment:
        # A tile that begins before counts[e] is written whole: it must end before the next expert.
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, -C % alignment))
    gemms = partial(MaskedGemms, tensors, act_fn, alignment, counts)
    return run_batches(gemms, tensors.get("w2_bias"), hidden, counts)[:, :C]


class ContiguousGemms(BlockScaledGemms):
    """See `BlockScaledGemms`; each expert's rows start at a multiple of `alignment`."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        alignment: int,
        rows: int,
        routing: SortedRouting,
        places: ScalePlaces,
        *,
        empty: Callable[..., Tensor],
    ) -> None:
        super().__init__(_SCHEME, tensors, act_fn, rows, routing, places, empty=empty)
        self.alignment = alignment

    def multiply(self, weight: str, x: BlockScaledRows, out: Tensor) -> None:
        """See `BlockScaledGemms.multiply`."""
        _check_alignment(self.alignment)
        library().m_grouped_fp8_fp4_gemm_nt_contiguous(
            (x.codes.view(torch.float8_e4m3fn), _by_row(x.scale, out.shape[0])),
            _weight(self.tensors, weight),
            out,
            self.routing.row_end,
            recipe_a=_RECIPE,
            recipe_b=_RECIPE,
            use_psum_layout=True,
            ensure_zero_padding=False,
        )


class MaskedGemms(ContiguousGemms):
    """The same for batches of C rows, of which the first `counts`, [E] int32, are in use."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        alignment: int,
        counts: Tensor,
        rows: int,
        routing: SortedRouting,
        places: ScalePlaces,
        *,
        empty: Callable[..., Tensor],
    ) -> None:
        super().__init__(tensors, act_fn, alignment, rows, routing, places, empty=empty)
        self.counts = counts

    def multiply(self, weight: str, x: BlockScaledRows, out: Tensor) -> None:
        """See `BlockScaledGemms.multiply`."""
        _check_alignment(self.alignment)
        E = self.counts.shape[0]
        C = out.shape[0] // E
        # The quantizer's columns run over all experts, DeepGEMM's over the rows of one. clone, as
        # contiguous() would keep the strides of a single column.
        scale = x.scale.view(-1, E, C).transpose(0, 1)
        scale = scale.clone(memory_format=torch.contiguous_format)
        library().m_grouped_fp8_fp4_gemm_nt_masked(
            (x.codes.view(torch.float8_e4m3fn).view(E, C, -1), _by_row(scale, C)),
            _weight(self.tensors, weight),
            out.view(E, C, -1),
            self.counts,
            # The mean rows of an expert, which only chooses a tile: they are on the device.
            self.alignment,
            recipe_a=_RECIPE,
            recipe_b=_RECIPE,
        )


def _weight(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    codes = tensors[f"{name}_qdata"].view(torch.int8)
    return codes, _by_row(tensors[f"{name}_scale"], codes.shape[1])


def _by_row(words: Tensor, rows: int) -> Tensor:
    """[..., K / 128, padded rows] as DeepGEMM takes it: [..., rows, K / 128], MN-major, no copy."""
    return words.mT[..., :rows, :]


def _check_alignment(wanted: int) -> None:
    """Refuse to launch DeepGEMM's kernels for other tiles than rows were laid out for.

    Raises:
        UnsupportedError: the alignment is not `wanted` any more.
    """
    found = row_alignment()
    if found != wanted:
        raise UnsupportedError(
            f"the alignment of deep_gemm's contiguous layout is {found}, but was {wanted} when "
            f"these experts laid out their rows; set it back to {wanted} where it was changed, or "
            "make the experts anew"
        )
