"""The functions of `moequant.act_fn`, on float32 in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from moequant.act_fn import SILU

if TYPE_CHECKING:
    from moequant.act_fn import ActFn


def constants_of(act: ActFn | None) -> dict[str, Any]:
    """The constexpr by which kernels know a function; of None, no function, ACT is ""."""
    if act is None:
        return {**constants_of(SILU), "ACT": "", "GATED": False}
    return {
        "ACT": act.name,
        "GATED": act.gated,
        "LIMIT": act.limit or 0.0,
        "ALPHA": act.alpha,
        "BETA": act.beta,
        "LINEAR_BETA": act.linear_beta or 0.0,
    }


@triton.jit
def activated(
    gate_up,
    bias,
    col,
    inside,
    HALF: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    """The function of columns `col` of a row and of its bias, float32; 0 where not `inside`.

    Up lies HALF columns behind gate.
    """
    gate = _biased(gate_up, bias, col, inside, BIAS)
    up = gate
    if GATED:
        up = _biased(gate_up + HALF, bias + HALF, col, inside, BIAS)
    y = act_fn(gate, up, ACT, GATED, LIMIT, ALPHA, BETA, LINEAR_BETA)
    return tl.where(inside, y, 0.0)


@triton.jit
def _biased(x, bias, col, inside, BIAS: tl.constexpr):
    value = tl.load(x + col, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + col, mask=inside, other=0.0)
    return value


@triton.jit
def act_fn(
    gate,
    up,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    """The function called NAME of `gate` and `up`, or of `up` alone; LIMIT and LINEAR_BETA 0: none.

    `tl.where` clamps, since NaN goes through it.
    """
    x = gate if GATED else up
    if LIMIT > 0:
        if NAME != "swiglustep":
            x = tl.where(x > LIMIT, LIMIT, x)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if NAME == "gelu":
        y = 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the logistic function of 2 z.
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1 + tl.exp(-z))
    elif NAME == "relu2":
        y = tl.where(x < 0, 0.0, x)
        y = y * y
    elif NAME == "situ":
        y = saturate(x, BETA) / (1 + tl.exp(-x))
    else:
        tl.static_assert(NAME == "silu" or NAME == "swigluoai" or NAME == "swiglustep")
        y = x / (1 + tl.exp(-ALPHA * x))
        if NAME == "swiglustep":
            y = tl.where(y > LIMIT, LIMIT, y)
    if GATED:
        if NAME == "swigluoai":
            up += BETA
        if LINEAR_BETA > 0:
            up = saturate(up, LINEAR_BETA)
        y *= up
    return y


@triton.jit
def saturate(x, BOUND: tl.constexpr):
    """BOUND * tanh(x / BOUND)."""
    return BOUND * tanh(x / BOUND)


@triton.jit
def tanh(x):
    """The hyperbolic tangent of float32, off by 2 ulp or so.

    From exp(2 |x|), and below 0.625, where that cancels, by the polynomial of Cephes' tanhf.
    """
    size = tl.abs(x)
    large = 1 - 2 / (1 + tl.exp(2 * size))
    large = tl.where(x < 0, -large, large)
    s = x * x
    p = -5.70498872745e-3 * s + 2.06390887954e-2
    p = p * s - 5.37397155531e-2
    p = p * s + 1.33314422036e-1
    p = p * s - 3.33332819422e-1
    return tl.where(size < 0.625, x + x * s * p, large)
