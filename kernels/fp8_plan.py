"""FP8 experts through a grouped GEMM that writes bfloat16.

    prepare          sort the routing, quantize each token, lay it in the rows of its experts
    gate and up      grouped GEMM
    activate         the activation function, quantized again
    down             grouped GEMM
    weighted reduce  per token, float32, in the order of its experts

Results of both GEMMs are rounded to bfloat16. Nothing is read on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from moequant.kernels.portable.portable_grouped_gemm import Rows
from moequant.kernels.portable.quantize import quantize_rows
from moequant.kernels.routing import SortedRouting, max_rows, sort_routing
from moequant.kernels.sm90.quantize_permute import copy_rows, prepare
from moequant.kernels.tensor_scale import TensorScale
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.arena import WorkspaceArena
    from moequant.kernels.routing import Grouping


class Fp8Plan(ABC):
    """Buffers for calls of exactly `tokens` tokens with `topk` experts each, in `arena`.

    Args:
        tensors: FP8 weights in the layout `stacked`, on a device of SM90.
        act_fn: the function between the GEMMs.
        tokens: M, at least 1; M * T at most MAX_PAIRS.
        topk: T, at least 1.
        arena: where buffers come from.
        grouping: how the rows of experts lie.
        by_token: whether activations have a scale a row; else one for 128 columns of it, [ceil(K /
            128), rows].
        row_bias: float32 [E, H], added to what the second GEMM computes; None if it does that.
        tensor_scale: whether all rows have the same scale, before each GEMM the one of the largest
            magnitude of all tokens or rows; `activate` finds the second.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        act_fn: ActFn,
        tokens: int,
        topk: int,
        arena: WorkspaceArena,
        *,
        grouping: Grouping,
        by_token: bool,
        row_bias: Tensor | None = None,
        tensor_scale: bool = False,
    ) -> None:
        self.tensors, self.act_fn = tensors, act_fn
        self.grouping, self.row_bias = grouping, row_bias
        E, H, I = tensors["w2_qdata"].shape
        pairs = tokens * topk
        rows = max_rows(pairs, E, grouping.alignment)

        def quantized(columns: int) -> tuple[Tensor, Tensor]:
            codes = arena.empty(rows, columns, dtype=torch.float8_e4m3fn)
            shape = (rows,) if by_token else (-(-columns // 128), rows)
            return codes, arena.empty(*shape, dtype=torch.float32)

        self.routing = SortedRouting.allocate(pairs, grouping, empty=arena.empty)
        self.tokens = None
        if tensor_scale:
            codes = Rows.allocate("fp8_token", tokens, H, dtype=torch.float32, empty=arena.empty)
            self.tokens = codes, TensorScale.allocate(empty=arena.empty)
        self.x, self.x_scale = quantized(H)
        self.gate_up = arena.empty(rows, tensors["w13_qdata"].shape[1], dtype=torch.bfloat16)
        self.act, self.act_scale = quantized(I)
        self.y = arena.empty(rows, H, dtype=torch.bfloat16)

    @abstractmethod
    def multiply(self, weight: str, x: Tensor, x_scale: Tensor, out: Tensor) -> None:
        """Multiply the rows of the routing by `weight`, "w13" or "w2"."""

    @abstractmethod
    def activate(self) -> None:
        """Quantize the function of `gate_up` to `act` and `act_scale`."""

    def __call__(
        self,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> None:
        """Run the experts; see `PackedExperts.run`. All tensors are contiguous."""
        routing, grouping, x, scale = self.routing, self.grouping, self.x, self.x_scale
        if self.tokens is not None and hidden_scale is None:
            tokens, of_all = self.tokens
            quantize_rows(hidden, tokens, static=of_all.find(hidden))
            hidden, hidden_scale = tokens.qdata.view(torch.float8_e4m3fn), tokens.scale
        if hidden_scale is None:
            prepare(hidden, topk_ids, routing, x, scale, grouping, expert_map=expert_map)
        else:
            sort_routing(topk_ids, routing, grouping, expert_map=expert_map)
            copy_rows(hidden, hidden_scale, routing.row_of_pair, x, scale)
        self.multiply("w13", x, scale, self.gate_up)
        self.activate()
        self.multiply("w2", self.act, self.act_scale, self.y)
        weighted_reduce(
            self.y,
            routing.row_of_pair,
            topk_weights,
            out,
            bias=self.row_bias,
            row_end=routing.row_end,
        )
