from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moequant.act_fn import GATED_ONLY, NAMES, SITU, SWIGLUOAI, ActFn
from moequant.kernels.launch import INTERPRETED
from moequant.kernels.portable.act_fn import act_fn

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FUNCTIONS = [
    SWIGLUOAI,
    SITU,
    ActFn(name="situ", beta=0.5, limit=1.5),
    ActFn(name="swigluoai", alpha=0.75, beta=-0.25),
    *(
        ActFn(name=name, limit=limit)
        for name in NAMES
        for limit in (None, 1.5)
        if limit or name != "swiglustep"
    ),
    *(
        ActFn(name=name, gated=False, limit=limit)
        for name in NAMES
        if name not in GATED_ONLY
        for limit in (None, 1.5)
    ),
]


@triton.jit
def apply(
    gate,
    up,
    out,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    i = tl.arange(0, 256)
    gate, up = tl.load(gate + i), tl.load(up + i)
    y = act_fn(gate, up, NAME, GATED, LIMIT, ALPHA, BETA, LINEAR_BETA)
    tl.store(out + i, y)


# NumPy, in the interpreter, speaks of exp(1e4) and of NaN.
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_it_is_the_reference_s_function(function):
    g = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 256, generator=g) * 4
    gate[:5] = up[:5] = torch.tensor([0.0, -0.0, 1e4, -1e4, torch.nan])
    out = torch.empty(256, device=DEVICE)
    apply[(1,)](
        gate.to(DEVICE), up.to(DEVICE), out, NAME=function.name, GATED=function.gated,
        LIMIT=function.limit or 0.0, ALPHA=function.alpha, BETA=function.beta,
        LINEAR_BETA=function.linear_beta or 0.0,
    )  # fmt: skip
    want = function(gate if function.gated else None, up)
    # exp is good to 2 ulp on either side (of 2**-24), erf and division likewise. Where 1 + erf
    # cancels, what is left is off by 2**-24 absolutely, and x and up multiply that.
    slack = gate.abs() * (up.abs() + 1) if function.gated else up.abs()
    off = (out.cpu() - want).abs()
    assert torch.equal(out.cpu().isnan(), want.isnan())
    assert bool((off <= 16 * 2.0**-24 * want.abs() + 2 * 2.0**-24 * slack)[~want.isnan()].all())
