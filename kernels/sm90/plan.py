"""The launches of a call on SM90, whatever the format, from hidden states to output.

prepare          sort the routing, quantize each token, lay it in the rows of its experts
gate and up      grouped GEMM, the activation function in its epilogue
quantize         the rows between the GEMMs, where the first GEMM cannot
down             grouped GEMM, bfloat16
weighted reduce  per token, float32, one expert after the other
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.kernels.launch import stream_of
from moequant.kernels.portable.portable_grouped_gemm import Rows
from moequant.kernels.portable.quantize import quantize_rows
from moequant.kernels.routing import sort_routing
from moequant.kernels.sm90.quantize_permute import (
    FEW_PAIRS,
    copy_rows,
    group_of,
    prepare,
    quantize_sorted_rows,
    sort_and_quantize,
)
from moequant.kernels.weighted_reduce import weighted_reduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.kernels.launch import Relaunch
    from moequant.kernels.routing import Grouping
    from moequant.kernels.sm90.buffers import Buffers
    from moequant.kernels.sm90.grouped_gemm import GroupedGemm

    _Launches = tuple[Relaunch, Relaunch | None, Relaunch]


class Sm90Plan:
    """Kernels and buffers for calls of M tokens with T experts each.

    It reads nothing on the host, so a call can be captured in a CUDA graph.

    Args:
        buffers: of the call.
        grouping: how rows are cut into tiles.
        gate_up: the first GEMM, in `buffers`.
        down: the second, likewise.
        gathers: whether the first GEMM gathers tokens that are quantized as they come.
        routed: whether it finds its tiles by itself.
        static13: float32 [1], the scale of all tokens that gate and up are fed; None, and each
            token's is computed.
        static2: likewise, of what down is fed.
    """

    def __init__(
        self,
        *,
        buffers: Buffers,
        grouping: Grouping,
        gate_up: GroupedGemm,
        down: GroupedGemm,
        gathers: bool,
        routed: bool,
        static13: Tensor | None,
        static2: Tensor | None,
    ) -> None:
        self.buffers = buffers
        self.grouping = grouping
        self.gate_up = gate_up
        self.down = down
        self._gathers = gathers
        self._routed = routed
        self._static13, self._static2 = static13, static2
        self._launches: dict[tuple[object, ...], _Launches] = {}

    def prepare(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> Relaunch | None:
        """First launches: sort, quantize, and permute where the first GEMM does not gather.

        Returns:
            See `quantize_permute.prepare`.
        """
        if self._routed:
            self.gate_up.route(topk_ids, expert_map)
        b = self.buffers
        if b.x is None or b.x_scale is None:
            self.gate_up.gather_from(hidden)
            return sort_routing(topk_ids, b.routing, self.grouping, expert_map=expert_map)
        if b.tokens is not None and hidden_scale is None:
            scale = self._static13 if b.scales is None else b.scales[0].find(hidden)
            quantize_rows(hidden, b.tokens, static=scale)
            hidden, hidden_scale = b.tokens.qdata.view(torch.float8_e4m3fn), b.tokens.scale
        if hidden_scale is not None:
            sort_routing(topk_ids, b.routing, self.grouping, expert_map=expert_map)
            if self._gathers:
                b.x.copy_(hidden)
                by_token = b.x_scale.view(hidden.shape[0], -1)
                by_token[:, : hidden_scale.shape[1]].copy_(hidden_scale)
            else:
                copy_rows(hidden, hidden_scale, b.routing.row_of_pair, b.x, b.x_scale)
            return None
        quantize = sort_and_quantize if self._gathers else prepare
        return quantize(
            hidden, topk_ids, b.routing, b.x, b.x_scale, self.grouping, expert_map=expert_map
        )

    def quantize(self) -> Relaunch | None:
        """What the first GEMM leaves, where it does not quantize that itself."""
        b = self.buffers
        if b.act is None or b.codes is None or b.codes_scale is None:
            return None
        row_of_pair, scale = b.routing.row_of_pair, self._static2
        if b.scales is not None:
            scale = b.scales[1].find(b.act, row_of_pair=row_of_pair)
        if scale is not None:
            rows = Rows(
                scheme="fp8_token",
                qdata=b.codes.view(torch.uint8),
                scale=b.codes_scale[:, None],
            )
            quantize_rows(b.act, rows, row_of_pair=row_of_pair, static=scale)
            return None
        return quantize_sorted_rows(b.act, b.routing, b.codes, b.codes_scale)

    def __call__(
        self,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor,
        expert_map: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> None:
        """Run the experts on the current stream; see `Sm90Weights.run`, all tensors contiguous."""
        stream = stream_of(hidden.device)
        gathered = self.buffers.x is None
        if gathered:
            hidden = _to_gather(hidden)
        kinds = None
        if hidden_scale is None:
            kinds = _kinds(hidden, topk_weights, topk_ids, out, expert_map)
            known = None if kinds is None else self._launches.get(kinds)
            if known is not None:
                self._launch_again(known, hidden, topk_weights, topk_ids, out, expert_map, stream)
                return
        prepared = self.prepare(hidden, topk_ids, expert_map, hidden_scale)
        self.gate_up(stream)
        quantized = self.quantize()
        self.down(stream)
        b = self.buffers
        reduced = weighted_reduce(b.y, b.routing.row_of_pair, topk_weights, out)
        if kinds is not None and prepared is not None and reduced is not None:
            self._launches[kinds] = (
                prepared.keeping_all_but(2 if gathered else 3),
                quantized,
                reduced.keeping_all_but(4),
            )

    def _launch_again(
        self,
        launches: _Launches,
        hidden: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor,
        expert_map: Tensor | None,
        stream: int,
    ) -> None:
        """A call by the launches that an earlier one of its kinds left."""
        first, between, last = launches
        if self._routed:
            self.gate_up.route(topk_ids, expert_map)
        ids_map = topk_ids if expert_map is None else expert_map
        if self.buffers.x is None:
            self.gate_up.gather_from(hidden)
            first(topk_ids, ids_map, stream=stream)
        else:
            first(hidden, topk_ids, ids_map, stream=stream)
        self.gate_up(stream)
        if between is not None:
            between(stream=stream)
        self.down(stream)
        last(self.buffers.y, self.buffers.routing.row_of_pair, topk_weights, out, stream=stream)

    def stages(
        self, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor
    ) -> dict[str, Callable[[], object]]:
        """The launches of a call by name, to be timed one by one behind a whole call.

        `sort` is a part of `prepare`; a GEMM comes with the launch that sets its counter to 0.
        """
        b, routing = self.buffers, self.buffers.routing

        def again(gemm: GroupedGemm) -> None:
            routing.units_taken.zero_()
            gemm(stream_of(hidden.device))

        stages: dict[str, Callable[[], object]] = {
            "prepare": lambda: self.prepare(hidden, topk_ids),
            "gate_up": lambda: again(self.gate_up),
        }
        if b.act is not None and b.codes is not None:
            stages["quantize"] = self.quantize
        stages["down"] = lambda: again(self.down)
        stages["reduce"] = lambda: weighted_reduce(b.y, routing.row_of_pair, topk_weights, out)
        if b.x_scale is not None and topk_ids.numel() > FEW_PAIRS[group_of(b.x_scale)]:
            stages["sort"] = lambda: sort_routing(topk_ids, routing, self.grouping)
        return stages


def _to_gather(hidden: Tensor) -> Tensor:
    """Hidden states as a GEMM gathers them: bfloat16, at a multiple of 16 bytes."""
    if hidden.dtype != torch.bfloat16:
        return hidden.to(torch.bfloat16)
    return hidden if hidden.data_ptr() % 16 == 0 else hidden.clone()


def _kinds(
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    out: Tensor,
    expert_map: Tensor | None,
) -> tuple[object, ...] | None:
    """What the Triton kernels of a call are compiled for, beside the plan; None where unaligned."""
    addresses = hidden.data_ptr() | topk_weights.data_ptr() | topk_ids.data_ptr() | out.data_ptr()
    mapped: tuple[object, ...] = ()
    if expert_map is not None:
        addresses |= expert_map.data_ptr()
        mapped = expert_map.dtype, expert_map.shape[0]
    if addresses % 16:
        return None
    return hidden.dtype, topk_weights.dtype, topk_ids.dtype, out.dtype, mapped
