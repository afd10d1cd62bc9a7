"""The functions of `moequant.runtime.act_fn`, on float32 in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def act_fn(
    gate, up, NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr
):
    """The function called NAME of `gate` and `up`, or of `up` alone; LIMIT 0 is none.

    `tl.where` clamps, since NaN goes through it.
    """
    x = gate if GATED else up
    if LIMIT > 0:
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
    else:
        tl.static_assert(NAME == "silu" or NAME == "swigluoai")
        y = x / (1 + tl.exp(-ALPHA * x))
    if GATED:
        y *= up + 1 if NAME == "swigluoai" else up
    return y
