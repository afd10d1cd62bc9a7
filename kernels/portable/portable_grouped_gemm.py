"""Grouped GEMM of the experts' weights, decoded in registers, by the rows of each expert.

Weights are the left operand, so that what is decoded can stay in registers, and 16 rows are enough
for a tile. All products are exact in bfloat16: codes of activations are, and weights but for scales
that multiply sums instead (see `weights`); sums are float32. A hidden state or a weight of float16
is a sum of two bfloat16 numbers, one of float32 of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moequant.kernels.fp8_codes import scale_of
from moequant.kernels.launch import INTERPRETED, launch, overlaps_launches, wait_for_inputs
from moequant.kernels.portable.act_fn import act_fn, constants_of
from moequant.kernels.portable.codes import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_int4,
    dot_exact,
    e2m1_pairs,
    encode_e4m3_byte,
    halves,
    int4_pairs,
)
from moequant.kernels.routing import TILE_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.kernels.portable.weights import Projection

_SPLIT = {torch.float16: 2, torch.float32: 3}
"""Numbers of bfloat16 that one of these is a sum of; else it is 1, codes included."""

GROUP = tl.constexpr(8)
"""Tiles whose programs run side by side, and share weights in L2."""
FIELDS = tl.constexpr(TILE_FIELDS)
IN_PYTHON = tl.constexpr(INTERPRETED)


def has_native_e4m3(device: torch.device) -> bool:
    """Whether the device converts E4M3 (SM89 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Activations, quantized by a scheme of `moequant.runtime.activations`.

    Attributes:
        scheme: "none", "fp8_group128" or "fp8_token".
        qdata: [R, K] contiguous; uint8 codes, or bfloat16, float16 or float32 for "none".
        scale: float32 [R, ceil(K / 128)] or [R, 1] contiguous; None for "none".
    """

    scheme: str
    qdata: Tensor
    scale: Tensor | None

    @staticmethod
    def allocate(
        scheme: str, rows: int, columns: int, *, dtype: torch.dtype, empty: Callable[..., Tensor]
    ) -> Rows:
        """Room for `rows` rows; not initialized.

        Args:
            scheme: "none", "fp8_group128" or "fp8_token".
            rows: R.
            columns: K.
            dtype: of activations that are not quantized.
            empty: makes a tensor of a shape and `dtype`, such as `WorkspaceArena.empty`.
        """
        if scheme == "none":
            return Rows(scheme=scheme, qdata=empty(rows, columns, dtype=dtype), scale=None)
        groups = -(-columns // 128) if scheme == "fp8_group128" else 1
        return Rows(
            scheme=scheme,
            qdata=empty(rows, columns, dtype=torch.uint8),
            scale=empty(rows, groups, dtype=torch.float32),
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """Which rows are which expert's, in tiles of at most `tile_rows`, 16 to 64.

    Either sorted: `tiles` and `count` as `SortedRouting` has them. Or batched: expert e has the
    rows e * capacity to e * capacity + count[e].

    Attributes:
        tile_rows: most rows of a tile, a power of two.
        max_tiles: at least as many as there are.
        count: int32, [1] tiles or [E] rows.
        tiles: [max_tiles, TILE_FIELDS] int32, or None if batched.
        capacity: rows between two experts' first if batched.
    """

    tile_rows: int
    max_tiles: int
    count: Tensor
    tiles: Tensor | None = None
    capacity: int = 0


def grouped_gemm(
    x: Rows,
    work: Work,
    weight: Projection,
    out: Rows,
    *,
    act: ActFn | None = None,
    gate: Projection | None = None,
    pair_of_row: Tensor | None = None,
    topk: int = 1,
) -> None:
    """Multiply the rows of each expert by its matrix, and apply `act`.

    Args:
        x: the activations, [R, K].
        work: the rows of each expert.
        weight: [E, N, K]; up, if there is a gate.
        out: [R, N], written but for rows that are no expert's; "none", or "fp8_group128" with
            scales.
        act: the function of the result, or of `gate`'s and the result; None leaves it.
        gate: like `weight`.
        pair_of_row: [R] int32 where row r of the work reads row pair_of_row[r] // topk of `x`.
        topk: T.
    """
    N, K = weight.rows, weight.columns
    first = weight if gate is None else gate
    device = x.qdata.device
    overlap = overlaps_launches(device)
    block_n, block_k, warps, stages = config_for(
        weight, x, out, tile_rows=work.tile_rows, gated=gate is not None
    )
    assert (gate is not None) == (act is not None and act.gated)
    if work.max_tiles == 0:
        return
    w_stride, scale_stride, end_stride, bias_stride = weight.strides
    assert first.strides[:3] == weight.strides[:3], "gate and up lie in tensors of the same strides"
    launch(
        experts_gemm,
        (work.max_tiles * triton.cdiv(N, block_n),),
        x.qdata,
        _or(x.scale, x.qdata),
        _or(pair_of_row, work.count),
        _or(work.tiles, work.count),
        work.count,
        first.qdata,
        first.scale,
        _or(first.end, first.scale),
        _or(first.bias, first.scale),
        weight.qdata,
        weight.scale,
        _or(weight.end, weight.scale),
        _or(weight.bias, weight.scale),
        out.qdata,
        _or(out.scale, out.qdata),
        work.max_tiles,
        work.capacity,
        N=N,
        K=K,
        ELEMENT=weight.element,
        CODES_A_BYTE=weight.codes_per_byte,
        SCALE_COLUMNS=weight.scale_columns,
        SCALE_ROWS=weight.scale_rows,
        END_ROWS=0 if weight.end is None else weight.end.dim(),
        W_STRIDE=w_stride,
        SCALE_STRIDE=scale_stride,
        END_STRIDE=end_stride,
        GATE_BIAS_STRIDE=first.strides[3],
        BIAS_STRIDE=bias_stride,
        W_SPLIT=_SPLIT.get(weight.qdata.dtype, 1),
        X_SCHEME=x.scheme,
        SPLIT=_SPLIT.get(x.qdata.dtype, 1),
        OUT_SCHEME=out.scheme,
        **constants_of(act),
        GATE_BIAS=first.bias is not None,
        BIAS=weight.bias is not None,
        TOPK=topk if pair_of_row is not None else 0,
        BATCHED=work.tiles is None,
        BLOCK_M=work.tile_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NATIVE=has_native_e4m3(device),
        OVERLAP=overlap,
        num_warps=warps,
        num_stages=stages,
        overlap=overlap,
    )


def config_for(
    weight: Projection, x: Rows, out: Rows, *, tile_rows: int, gated: bool
) -> tuple[int, int, int, int]:
    """Columns of the result and of the weights a step, warps, and stages of a program's pipeline.

    The fastest tried on an H200 with the sizes of Qwen3-30B, of those that fit every device.
    """
    element = weight.element
    many = tile_rows > 32
    if out.scheme == "fp8_group128":
        block_n, block_k, warps = 128, 128, 8
    elif element == "e2m1" and (many or not gated):
        block_n, block_k, warps = 128, 64, 4
    else:
        block_n, block_k, warps = 128 if many and not gated else 64, 128, 4
    split = x.qdata.dtype in _SPLIT
    if split or element in ("bf16", "fp16"):  # which take twice the room, or more
        block_k = 64
    if element == "fp32":
        block_n, block_k = 64, 32
    return block_n, block_k, warps, 2 if split else 3


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel is given where it reads nothing."""
    return other if tensor is None else tensor


@triton.jit(do_not_specialize=["max_tiles", "capacity"])
def experts_gemm(
    x,
    x_scale,
    pair_of_row,
    tiles,
    count,
    gate,
    gate_scale,
    gate_end,
    gate_bias,
    up,
    up_scale,
    up_end,
    up_bias,
    out,
    out_scale,
    max_tiles,
    capacity,
    N: tl.constexpr,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    END_ROWS: tl.constexpr,
    W_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    END_STRIDE: tl.constexpr,
    GATE_BIAS_STRIDE: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    W_SPLIT: tl.constexpr,
    X_SCHEME: tl.constexpr,
    SPLIT: tl.constexpr,
    OUT_SCHEME: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    GATED: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    BIAS: tl.constexpr,
    TOPK: tl.constexpr,
    BATCHED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK_N columns of one tile, transposed in registers."""
    wait_for_inputs(OVERLAP)
    # GROUP tiles go through all columns together.
    program = tl.program_id(0)
    width = GROUP * tl.cdiv(N, BLOCK_N)
    first_tile = program // width * GROUP
    size = tl.minimum(max_tiles - first_tile, GROUP)
    tile = first_tile + program % width % size
    block_n = program % width // size
    if BATCHED:
        tiles_an_expert = tl.cdiv(capacity, BLOCK_M)
        expert = tile // tiles_an_expert
        begin = tile % tiles_an_expert * BLOCK_M
        rows = tl.minimum(tl.load(count + expert), capacity) - begin
        first = expert.to(tl.int64) * capacity + begin
    else:
        there = tile < tl.load(count)
        expert = tl.load(tiles + tile * FIELDS, mask=there, other=0)
        first = tl.load(tiles + tile * FIELDS + 1, mask=there, other=0).to(tl.int64)
        rows = tl.load(tiles + tile * FIELDS + 2, mask=there, other=0)
    expert = expert.to(tl.int64)
    if rows <= 0:
        return
    m = tl.arange(0, BLOCK_M)
    live = m < rows
    row = first + m
    source = row
    if TOPK > 0:
        source = tl.load(pair_of_row + row, mask=live, other=0).to(tl.int64) // TOPK
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)

    up_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gate_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        inside = (k < K)[:, None] & live[None, :]
        xt = tl.load(x + source[None, :] * K + k[:, None], mask=inside, other=0)
        if X_SCHEME != "none":
            xt = decode_e4m3(xt, NATIVE).to(tl.bfloat16)
        up_sum = add_product(
            up_sum, xt, up, up_scale, x_scale, expert, source, live, n, k0, N, K, ELEMENT,
            CODES_A_BYTE, SCALE_COLUMNS, SCALE_ROWS, W_STRIDE, SCALE_STRIDE, W_SPLIT, X_SCHEME,
            SPLIT, BLOCK_N, BLOCK_K, NATIVE,
        )  # fmt: skip
        if GATED:
            gate_sum = add_product(
                gate_sum, xt, gate, gate_scale, x_scale, expert, source, live, n, k0, N, K, ELEMENT,
                CODES_A_BYTE, SCALE_COLUMNS, SCALE_ROWS, W_STRIDE, SCALE_STRIDE, W_SPLIT, X_SCHEME,
                SPLIT, BLOCK_N, BLOCK_K, NATIVE,
            )  # fmt: skip

    y = finished(
        up_sum, up_end, up_bias, x_scale, expert, source, live, n, N, END_ROWS, END_STRIDE,
        BIAS_STRIDE, X_SCHEME, BIAS,
    )  # fmt: skip
    if GATED:
        gate_sum = finished(
            gate_sum, gate_end, gate_bias, x_scale, expert, source, live, n, N, END_ROWS,
            END_STRIDE, GATE_BIAS_STRIDE, X_SCHEME, GATE_BIAS,
        )  # fmt: skip
    if ACT != "":
        y = act_fn(gate_sum, y, ACT, GATED, LIMIT, ALPHA, BETA, LINEAR_BETA)

    to = out + row[None, :] * N + n[:, None]
    inside = (n < N)[:, None] & live[None, :]
    if OUT_SCHEME == "fp8_group128":
        tl.static_assert(BLOCK_N == 128)
        scale = scale_of(tl.max(tl.abs(y), 0))
        y = encode_e4m3_byte(tl.math.div_rn(y, scale[None, :]), NATIVE)
        tl.store(out_scale + row * tl.cdiv(N, 128) + block_n, scale, mask=live)
    tl.store(to, y, mask=inside)


@triton.jit
def add_product(
    total,
    xt,
    weight,
    scale,
    x_scale,
    expert,
    source,
    live,
    n,
    k0,
    N: tl.constexpr,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
    CODES_A_BYTE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    W_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    W_SPLIT: tl.constexpr,
    X_SCHEME: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """`total` plus the product over BLOCK_K columns from `k0` on.

    Weights are [BLOCK_N, BLOCK_K] as they are, or in bfloat16, times scales exact in it.
    """
    inside_n = (n < N)[:, None]
    at_row = weight + (expert * W_STRIDE + n)[:, None] * (K // CODES_A_BYTE)
    byte = (k0 // CODES_A_BYTE + tl.arange(0, BLOCK_K // CODES_A_BYTE))[None, :]
    data = tl.load(at_row + byte, mask=inside_n & (byte < K // CODES_A_BYTE), other=0)
    if ELEMENT == "bf16" or ELEMENT == "fp16" or ELEMENT == "fp32":
        w = data
    elif ELEMENT == "e4m3":
        w = decode_e4m3(data, NATIVE)
        if SCALE_COLUMNS == 32:
            spread = spread_scale(
                scale, expert, n, k0, SCALE_STRIDE, N, K, SCALE_COLUMNS, SCALE_COLUMNS, BLOCK_N,
                BLOCK_K, NATIVE,
            )  # fmt: skip
            w *= spread
        w = w.to(tl.bfloat16)
    elif ELEMENT == "int4":
        if IN_PYTHON:
            both = tl.join(decode_int4(data & 0xF), decode_int4(data >> 4)).to(tl.bfloat16)
        else:
            both = halves(int4_pairs(data))
        w = tl.reshape(both, [BLOCK_N, BLOCK_K])
    else:
        tl.static_assert(ELEMENT == "e2m1")
        spread = spread_scale(
            scale, expert, n, k0, SCALE_STRIDE, N, K, SCALE_COLUMNS, SCALE_COLUMNS // 2, BLOCK_N,
            BLOCK_K, NATIVE,
        )  # fmt: skip
        if IN_PYTHON:
            both = tl.join(decode_e2m1(data & 0xF), decode_e2m1(data >> 4))
            both = (both * spread[:, :, None]).to(tl.bfloat16)
        else:
            both = halves(e2m1_pairs(data, spread))
        w = tl.reshape(both, [BLOCK_N, BLOCK_K])
    if SCALE_COLUMNS != 128 and X_SCHEME != "fp8_group128":
        total = dot_exact(w, xt, total, W_SPLIT, SPLIT, IN_PYTHON)
    else:
        zero = tl.zeros(total.shape, tl.float32)
        part = dot_exact(w, xt, zero, W_SPLIT, SPLIT, IN_PYTHON)
        block = k0 // 128
        if SCALE_COLUMNS == 128:
            scale_row = expert * SCALE_STRIDE + n // SCALE_ROWS
            at = scale + scale_row * tl.cdiv(K, 128) + block
            part *= tl.load(at, mask=n < N, other=0).to(tl.float32)[:, None]
        if X_SCHEME == "fp8_group128":
            part *= tl.load(x_scale + source * tl.cdiv(K, 128) + block, mask=live, other=0)[None, :]
        total += part
    return total


@triton.jit
def spread_scale(
    scale,
    expert,
    n,
    k0,
    SCALE_STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The scale of each byte of codes, float32: E4M3 of 16 columns, E8M0 of 32; BYTES share one."""
    GROUPS: tl.constexpr = BLOCK_K // SCALE_COLUMNS
    group = (k0 // SCALE_COLUMNS + tl.arange(0, GROUPS))[None, :]
    at_group = scale + (expert * SCALE_STRIDE + n)[:, None] * (K // SCALE_COLUMNS) + group
    inside = (n < N)[:, None] & (group < K // SCALE_COLUMNS)
    code = tl.load(at_group, mask=inside, other=0)
    group_scale = decode_e4m3(code, NATIVE) if SCALE_COLUMNS == 16 else decode_e8m0(code)
    spread = tl.broadcast_to(group_scale[:, :, None], [BLOCK_N, GROUPS, BYTES])
    return tl.reshape(spread, [BLOCK_N, GROUPS * BYTES])


@triton.jit
def finished(
    total,
    end,
    bias,
    x_scale,
    expert,
    source,
    live,
    n,
    N: tl.constexpr,
    END_ROWS: tl.constexpr,
    END_STRIDE: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    X_SCHEME: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The sum times the scales of the whole of it, plus bias."""
    if END_ROWS == 1:
        total *= tl.load(end + expert * END_STRIDE)
    if END_ROWS == 2:
        total *= tl.load(end + expert * END_STRIDE + n, mask=n < N, other=0)[:, None]
    if X_SCHEME == "fp8_token":
        total *= tl.load(x_scale + source, mask=live, other=0)[None, :]
    if BIAS:
        total += tl.load(bias + expert * BIAS_STRIDE + n, mask=n < N, other=0).to(tl.float32)[
            :, None
        ]
    return total
