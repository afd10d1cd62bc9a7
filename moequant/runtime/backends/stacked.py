"""Gate over up in one tensor, row-major: the layout of backends that name no other.

    w13_qdata         [E, 2 * Ip, K]      gate in rows 0 to I, up in rows Ip to Ip + I
    w13_scale         [E, 2 * S, ...]     the S rows of gate's scales, then those of up's
    w13_global_scale  [E, 2]              gate's, then up's; of formats that have one
    w13_bias          [E, 2 * Ip] float32
    w13_input_scale   [1] or [E] float32, static scale of the activations; and w2_input_scale
    w2_...            down, as it is

Ip is I rounded up to whole scale blocks: 128 rows for fp8_block, so that no block holds rows of
both. The rows in between are zero. Experts without a gate have up alone: [E, Ip, K]. vLLM calls
these tensors w13_weight and w2_weight and puts them in the same order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moequant.formats import QuantizedWeight, get_format
from moequant.runtime.backends.layout import Layout
from moequant.runtime.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.runtime.workload import Workload

_MOST_BLOCK_ROWS = 1 << 16
"""A scale of more rows than this is one of the whole matrix, which needs no padding."""


class Stacked(Layout):
    """See the module."""

    name = "stacked"
    version = 2

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """Copy gate and up into one tensor, unless they are views of one already."""
        gate, up, down = weights.gate, weights.up, weights.down
        first = [up] if gate is None else [gate, up]
        rows = padded_rows(weights.format, weights.intermediate)
        tensors = {
            "w13_qdata": _stack([q.qdata for q in first], rows),
            "w13_scale": _stack([q.scale for q in first], up.scale.shape[1]),
            "w2_qdata": down.qdata.contiguous(),
            "w2_scale": down.scale.contiguous(),
        }
        if up.global_scale is not None and down.global_scale is not None:
            tensors["w13_global_scale"] = _stack(
                [q.global_scale[:, None] for q in first if q.global_scale is not None], 1
            )
            tensors["w2_global_scale"] = down.global_scale.contiguous()
        return tensors | stack_biases(weights, rows) | name_input_scales(weights.input_scales())

    def unpack(self, tensors: Mapping[str, Tensor], workload: Workload) -> ExpertWeights:
        """See `Layout.unpack`; all are views."""
        w = workload
        shape = (w.experts, w.intermediate, w.hidden)
        return ExpertWeights.of(
            projections(tensors, format=w.format, shape=shape, gated=w.act_fn.gated),
            w.act_fn,
            **unstack_biases(tensors, w.intermediate, gated=w.act_fn.gated),
            **input_scales_in(tensors),
        )


STACKED = Stacked()

_PARTS = ("w13_qdata", "w13_scale", "w13_global_scale")
_INPUT_SCALES = {"gate_up_input_scale": "w13_input_scale", "down_input_scale": "w2_input_scale"}
INPUT_SCALES = tuple(_INPUT_SCALES.values())
"""The tensors with static scales of activations, in every layout."""


def padded_rows(format: str, intermediate: int) -> int:
    """Ip: rows of gate's and of up's part of w13 for I = `intermediate`."""
    block = get_format(format).block[0]
    return intermediate if block > _MOST_BLOCK_ROWS else -(-intermediate // block) * block


def room(like: Mapping[str, QuantizedWeight], experts: int) -> dict[str, Tensor]:
    """Tensors for `experts` experts, without biases: not initialized, but for padding.

    Args:
        like: weights of one expert by projection: "gate", "up" and "down", or "up" and "down". Each
            tensor is on the device of the part that goes into it.
        experts: how many.
    """
    up, down = like["up"], like["down"]
    halves = len(like) - 1
    rows = padded_rows(up.format, up.shape[0])

    def empty(part: Tensor, rows: int) -> Tensor:
        return part.new_empty((experts, rows, *part.shape[1:]))

    tensors = {
        "w13_qdata": empty(up.qdata, halves * rows),
        "w13_scale": empty(up.scale, halves * up.scale.shape[0]),
        "w2_qdata": empty(down.qdata, down.qdata.shape[0]),
        "w2_scale": empty(down.scale, down.scale.shape[0]),
    }
    if up.global_scale is not None and down.global_scale is not None:
        tensors["w13_global_scale"] = up.global_scale.new_empty(experts, halves)
        tensors["w2_global_scale"] = down.global_scale.new_empty(experts)
    for half in tensors["w13_qdata"].tensor_split(halves, 1):
        half[:, up.shape[0] :].view(torch.uint8).zero_()
    return tensors


def projections(
    tensors: Mapping[str, Tensor], *, format: str, shape: Sequence[int], gated: bool
) -> dict[str, QuantizedWeight]:
    """The weights in `tensors` by projection, as views; `shape` is E, I, H."""
    E, I, H = shape
    halves = 2 if gated else 1
    parts = [
        {name: half for name in _PARTS if (half := _half(tensors, name, halves, index)) is not None}
        for index in range(halves)
    ]
    first = [
        QuantizedWeight(
            format=format,
            qdata=part["w13_qdata"][:, :I],
            scale=part["w13_scale"],
            global_scale=part["w13_global_scale"][:, 0] if "w13_global_scale" in part else None,
            shape=torch.Size((E, I, H)),
        )
        for part in parts
    ]
    down = QuantizedWeight(
        format=format,
        qdata=tensors["w2_qdata"],
        scale=tensors["w2_scale"],
        global_scale=tensors.get("w2_global_scale"),
        shape=torch.Size((E, H, I)),
    )
    return dict(
        zip(("gate", "up", "down") if gated else ("up", "down"), [*first, down], strict=True)
    )


def _half(tensors: Mapping[str, Tensor], name: str, halves: int, index: int) -> Tensor | None:
    """Part `index` of the rows of a tensor, if there is such a tensor."""
    tensor = tensors.get(name)
    return None if tensor is None else tensor.tensor_split(halves, 1)[index]


def _stack(parts: Sequence[Tensor], rows: int) -> Tensor:
    """[E, parts * rows, ...]: the rows of each part, then zeros up to `rows`."""
    stacked = _as_stacked(parts, rows)
    if stacked is not None:
        return stacked
    E, used, *rest = parts[0].shape
    out = parts[0].new_empty((E, len(parts), rows, *rest))
    for index, part in enumerate(parts):
        out[:, index, :used] = part
    out[:, :, used:].view(torch.uint8).zero_()
    return out.flatten(1, 2)


def _as_stacked(parts: Sequence[Tensor], rows: int) -> Tensor | None:
    """The contiguous [E, parts * rows, ...] that the parts are views of; None if none."""
    first = parts[0]
    E, used, *rest = first.shape
    shape = (E, len(parts) * rows, *rest)
    strides = torch.empty(shape, device="meta").stride()
    step = rows * math.prod(rest)
    end = first.storage_offset() + E * len(parts) * step
    if (
        first.device.type == "meta"
        or any(part.stride() != strides for part in parts)
        or end * first.element_size() > first.untyped_storage().nbytes()
        or any(
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.storage_offset() != first.storage_offset() + index * step
            for index, part in enumerate(parts)
        )
    ):
        return None
    stacked = first.as_strided(shape, strides)
    # What lies between the parts may be rows of another tensor.
    padding = stacked.view(E, len(parts), rows, *rest)[:, :, used:]
    return None if padding.contiguous().view(torch.uint8).any() else stacked


def stack_biases(weights: ExpertWeights, rows: int) -> dict[str, Tensor]:
    """`w13_bias` and `w2_bias`, float32, of those that there are.

    Args:
        weights: the experts here.
        rows: of gate's and of up's part of w13; rows after I are 0.
    """
    tensors = {}
    gate, up, down = weights.gate_bias, weights.up_bias, weights.down_bias
    biases = [up] if weights.gate is None else [gate, up]
    known = [bias for bias in biases if bias is not None]
    if known:
        zero = torch.zeros_like(known[0], dtype=torch.float32)
        parts = [zero if bias is None else bias.float() for bias in biases]
        tensors["w13_bias"] = _stack(parts, rows)
    if down is not None:
        tensors["w2_bias"] = down.float().contiguous()
    return tensors


def name_input_scales(scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`w13_input_scale` and `w2_input_scale`, of static scales by field of `ExpertWeights`."""
    return {_INPUT_SCALES[name]: scale for name, scale in scales.items()}


def input_scales_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `name_input_scales`: by field of `ExpertWeights`."""
    return {field: tensors[name] for field, name in _INPUT_SCALES.items() if name in tensors}


def unstack_biases(
    tensors: Mapping[str, Tensor], intermediate: int, *, gated: bool
) -> dict[str, Tensor]:
    """The inverse of `stack_biases`: views, by field of `ExpertWeights`."""
    biases = {"down_bias": tensors["w2_bias"]} if "w2_bias" in tensors else {}
    names = ("gate_bias", "up_bias") if gated else ("up_bias",)
    for index, name in enumerate(names):
        bias = _half(tensors, "w13_bias", len(names), index)
        if bias is not None:
            biases[name] = bias[:, :intermediate]
    return biases
