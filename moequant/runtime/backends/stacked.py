"""Gate over up as one weight, which backends with one GEMM for both want, and without a copy kept.

I is padded to whole scale blocks (Ip), with zeros. What is copied is handed on as views into the
copy, so that whoever gave the weights can keep these; views that come back are recognized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moequant.formats import QuantizedWeight
from moequant.layouts.gate_up import padded_rows, split_gate_up, stack_gate_up

if TYPE_CHECKING:
    from torch import Tensor

    from moequant.runtime.weights import ExpertWeights


def first_weight(weights: ExpertWeights) -> QuantizedWeight:
    """The weight of the first GEMM, contiguous; reads nothing on the host.

    Returns:
        Gate over up, [E, 2 * Ip, H], without a copy where they lie so; or up alone, [E, Ip, H].
    """
    gate, up = weights.gate, weights.up
    if gate is None:
        return _padded(up)
    return _stacked(gate, up) or stack_gate_up(gate, up)


def first_weight_once(weights: ExpertWeights) -> tuple[QuantizedWeight, ExpertWeights | None]:
    """The same, and `weights` with gate and up as views into it, or None where nothing was copied.

    Waits for the device.
    """
    gate, up = weights.gate, weights.up
    if gate is None:
        w = _padded_in_place(up) or _padded(up)
        if w.qdata.data_ptr() == up.qdata.data_ptr():
            return w, None
        return w, replace(weights, up=_first_rows(w, up.shape))
    w13 = first_weight(weights)
    if w13.qdata.data_ptr() == gate.qdata.data_ptr():
        return w13, None
    gate, up = split_gate_up(w13, weights.intermediate)
    return w13, replace(weights, gate=gate, up=up)


def first_bias(weights: ExpertWeights, rows: int) -> Tensor | None:
    """Float32 biases of the first GEMM: [E, 2 * rows], or [E, rows] where there is no gate."""
    biases = [weights.gate_bias, weights.up_bias] if weights.act_fn.gated else [weights.up_bias]
    if all(bias is None for bias in biases):
        return None
    out = torch.zeros(weights.experts, len(biases), rows, device=weights.device)
    for half, bias in enumerate(biases):
        if bias is not None:
            out[:, half, : weights.intermediate] = bias
    return out.flatten(1)


def _padded(up: QuantizedWeight) -> QuantizedWeight:
    """`up` with rows of zeros to whole scale blocks; itself where it needs none."""
    E, I, _ = up.shape
    rows = padded_rows(up.format, I)
    gap = up.qdata.new_zeros(E, rows - I, up.qdata.shape[2])
    qdata = torch.cat([up.qdata, gap], dim=1) if rows > I else up.qdata.contiguous()
    return _weight(up, qdata, up.scale.contiguous())


def _padded_in_place(up: QuantizedWeight) -> QuantizedWeight | None:
    """What `up` is the first rows of, as `_first_rows` made it; None where it is not."""
    E, I, _ = up.shape
    rows, columns = padded_rows(up.format, I), up.qdata.shape[2]
    size, end = E * rows * columns, up.qdata.untyped_storage().nbytes()
    start = up.qdata.storage_offset()
    fits = (start + size) * up.qdata.element_size() <= end
    if up.qdata.stride() != (rows * columns, columns, 1) or not fits:
        return None
    qdata = up.qdata.as_strided((E, rows, columns), up.qdata.stride())
    if qdata[:, I:].view(torch.uint8).any():  # rows of something else
        return None
    return _weight(up, qdata, up.scale.contiguous())


def _first_rows(w: QuantizedWeight, shape: torch.Size) -> QuantizedWeight:
    return QuantizedWeight(
        format=w.format,
        qdata=w.qdata[:, : shape[1]],
        scale=w.scale,
        global_scale=w.global_scale,
        shape=shape,
    )


def _stacked(gate: QuantizedWeight, up: QuantizedWeight) -> QuantizedWeight | None:
    """What gate and up are views into, as `split_gate_up` made them; None where they are not."""
    rows = padded_rows(gate.format, gate.shape[1])
    qdata = _halves(gate.qdata, up.qdata, rows)
    scale = _halves(gate.scale, up.scale, gate.scale.shape[1])
    return None if qdata is None or scale is None else _weight(gate, qdata, scale)


def _halves(first: Tensor, second: Tensor, rows: int) -> Tensor | None:
    """The contiguous [E, 2 * rows, columns] in which both [E, <= rows, columns] are views."""
    E, _, columns = first.shape
    whole = (2 * rows * columns, columns, 1)
    if (
        first.stride() != whole
        or second.stride() != whole
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or second.storage_offset() != first.storage_offset() + rows * columns
    ):
        return None
    return first.as_strided((E, 2 * rows, columns), whole)


def _weight(part: QuantizedWeight, qdata: Tensor, scale: Tensor) -> QuantizedWeight:
    """A weight of `qdata` and `scale`, in the format and with the columns of `part`."""
    shape = torch.Size((*qdata.shape[:2], part.shape[2]))
    return QuantizedWeight(
        format=part.format, qdata=qdata, scale=scale, global_scale=part.global_scale, shape=shape
    )
