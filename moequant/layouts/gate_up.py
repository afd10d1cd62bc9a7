"""Gate over up: w1 [..., I, H] and w3 [..., I, H] as the w13 [..., 2 * Ip, H] of one GEMM.

    w13[n]      = gate[n]   and   w13[Ip + n] = up[n]     for n < I
    w13[n]      = 0         and   w13[Ip + n] = 0         for I <= n < Ip

Ip is I rounded up to whole scale blocks, so that no block holds rows of both: Ip = I but for
fp8_block with I not a multiple of 128. The zero rows share the scale of the last real block. The
result is a weight of the format like any other, of logical shape [..., 2 * Ip, H]; its GEMM gives
Ip columns per half, and SiLU(gate) * up is 0 in those from I on.

Source: the order is that of vLLM's fused MoE weights (`w13_weight`: w1, then w3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import QuantizedWeight, get_format

VERSION = 1


def padded_rows(format: str, intermediate: int) -> int:
    """Rows Ip of each half of w13 for `intermediate` rows of gate and of up."""
    block_n = get_format(format).block[0]
    return -(-intermediate // block_n) * block_n


def stack_gate_up(
    gate: QuantizedWeight, up: QuantizedWeight, *, name: str = "w13"
) -> QuantizedWeight:
    """Stack gate over up; copies.

    Args:
        gate: w1, [..., I, H].
        up: w3, of the same format and shape, and of the same global scales.
        name: what errors call the pair.

    Returns:
        w13, [..., 2 * Ip, H], with the one global scale per expert that gate and up share.

    Raises:
        UnsupportedError: gate and up are in different formats.
        CheckpointError: their shapes or their global scales differ.
    """
    if gate.format != up.format:
        raise UnsupportedError(
            f"{name}: gate is in {gate.format}, up in {up.format}; a fused GEMM wants one format, "
            "so give both the same in the recipe"
        )
    if gate.shape != up.shape:
        raise CheckpointError(
            f"{name}: gate is {list(gate.shape)}, up is {list(up.shape)}; both must be [..., I, H]"
        )
    _check_global_scales(gate, up, name)
    *lead, rows, K = gate.shape
    padded = padded_rows(gate.format, rows)
    gap = gate.qdata.new_zeros(*lead, padded - rows, gate.qdata.shape[-1])
    return QuantizedWeight(
        format=gate.format,
        qdata=torch.cat([gate.qdata, gap, up.qdata, gap], dim=-2),
        scale=torch.cat([gate.scale, up.scale], dim=-2),
        global_scale=gate.global_scale,
        shape=torch.Size((*lead, 2 * padded, K)),
    )


def split_gate_up(
    w13: QuantizedWeight, intermediate: int, *, name: str = "w13"
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Inverse of `stack_gate_up`: gate and up as views of w13, without padding.

    Args:
        w13: [..., 2 * Ip, H].
        intermediate: I, rows of gate and of up.
        name: what errors call the weight.

    Raises:
        CheckpointError: w13 does not have 2 * Ip rows, or its padding rows are not zero.
    """
    padded = padded_rows(w13.format, intermediate)
    *lead, rows, K = w13.shape
    if rows != 2 * padded:
        raise CheckpointError(
            f"{name}: {rows} rows, but gate and up of {intermediate} rows make {2 * padded} "
            f"({w13.format})"
        )
    gate, up = (
        QuantizedWeight(
            format=w13.format,
            qdata=_crop(qdata, intermediate, name),
            scale=scale,
            global_scale=w13.global_scale,
            shape=torch.Size((*lead, intermediate, K)),
        )
        for qdata, scale in zip(
            w13.qdata.tensor_split(2, -2), w13.scale.tensor_split(2, -2), strict=True
        )
    )
    return gate, up


def _crop(qdata: Tensor, rows: int, name: str) -> Tensor:
    """The first `rows` rows of a half; those below must be zero bytes."""
    if qdata[..., rows:, :].view(torch.uint8).any():
        raise CheckpointError(
            f"{name}: rows below row {rows} of a half are padding, but hold codes that are not "
            "zero; prepare the checkpoint again"
        )
    return qdata[..., :rows, :]


def _check_global_scales(gate: QuantizedWeight, up: QuantizedWeight, name: str) -> None:
    """Refuse a pair that one fused GEMM would scale wrong, naming both values."""
    if gate.global_scale is None or up.global_scale is None:
        return
    differs = gate.global_scale != up.global_scale
    if differs.any():
        index = tuple(differs.nonzero()[0].tolist())
        expert = f" of expert {list(index)}" if index else ""
        raise CheckpointError(
            f"{name}: global scale{expert} is {gate.global_scale[index].item()} for gate, "
            f"{up.global_scale[index].item()} for up; a fused GEMM has one, so quantize gate and "
            "up together"
        )
