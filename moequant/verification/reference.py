"""An independent evaluation of a layer of experts: plain loops in float64, with an error bound.

It does not use the runtime or the formats, so that a bug there cannot hide itself.

It computes the exact layer and, for every number, a bound on the error of a correct float32
evaluation. Derivation, with u = 2**-24, gamma(n) = n u / (1 - n u) (Higham,
"Accuracy and Stability of Numerical Algorithms", chapters 2 and 3), dx the bound on an input x:

* An inner product of K terms, summed in any order, fused or not, is off by gamma(K) sum |x| |w| at
  most. Three more roundings of relative size u may sit in each term: two where a weight is decoded,
  code times scale times global scale, and one where an activation is formed. With the input off,
  dy = sum (dx + gamma(K + 3) (|x| + dx)) |w|.
* silu has a slope of at most 1.1 (1.0998, at 2.4). Computed as x / (1 + exp(-x)) with an
  exponential good to 2 ulp, s = silu(x) is off by 8 u |s| at most: 4 u from the exponential, u each
  from addition and division, and second orders. Where exp(-x) overflows the result is 0, and s no
  larger than 2.7e-37 < 24 * 2**-126. So ds = 1.1 dx + gamma(8) (|s| + 1.1 dx) + 24 * 2**-126.
* With a factor, x / (1 + exp(-a x)): a and a x are rounded, so that the exponential is off by
  exp(|a x| gamma(2)) - 1, and its result relatively no more. The slope is silu's, at a x. Beyond
  |a x| = 200 that error is none: the result is x, or below 2**-126.
* gelu has a slope of at most 1.13 (1.1290). 1 + erf or 1 + tanh is off by 9 u at most: 4 u from the
  function, good to 2 ulp; 3 u from its argument, whose relative error of 6 u at most it passes on
  times 0.49 at most; and 2 u from the addition. With two products, dg = 1.13 dx +
  gamma(8) (|x| + dx).
* relu**2 is off by dr = 2 |x| dx + dx**2, and gamma(1) (x**2 + dr) from rounding.
* A clamp brings numbers no farther apart; its limit may be rounded. A bias b adds one rounding,
  u (|x + b| + dx), and so does up + 1.
* The product s * up is off by e = ds |up| + |s| dup + ds dup, and by u (|s up| + e) from rounding.
* The weighted sum over T experts is an inner product of T terms.
* Results below 2**-126 may be flushed to zero: one such error is added for each term of a sum and
  each product. Nothing is assumed to overflow.

Float64's own rounding, 2**-29 of the above, is covered by counting one rounding more in every sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Activate = Callable[["Bounded | None", "Bounded"], "Bounded"]

_U = 2.0**-24
_TINY = 2.0**-126
_FLOAT32_MAX = torch.finfo(torch.float32).max
_SILU_SLOPE = 1.1
_SILU_ROUNDINGS = 8
_SILU_TINY = 24 * _TINY
_SILU_REACH = 200.0
_GELU_SLOPE = 1.13
_GELU_ROUNDINGS = 8
_TERM_ROUNDINGS = 3 + 1
_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """An exact value and a bound on the error of its float32 evaluation.

    Attributes:
        value: [...] float64.
        error: [...] float64, at least 0.
    """

    value: Tensor
    error: Tensor

    @property
    def magnitude(self) -> Tensor:
        """Upper bound of the magnitude of the float32 evaluation."""
        return self.value.abs() + self.error


def bounded(value: Tensor, error: Tensor) -> Bounded:
    """A value with its error: infinite where a float32 evaluation may overflow."""
    overflows = ~(value.abs() + error <= _FLOAT32_MAX)
    return Bounded(value=value, error=torch.where(overflows, torch.inf, error))


def exact(value: Tensor) -> Bounded:
    """A value that float32 holds exactly."""
    value = value.double()
    return Bounded(value=value, error=torch.zeros_like(value))


def project(x: Bounded, weight: Tensor) -> Bounded:
    """`x @ weight.T` of [R, K] and [N, K] float64: [R, N]."""
    K = weight.shape[1]
    # Terms, and decoded weights times their activation, may underflow.
    underflow = 2 * _TINY * (K + x.magnitude.sum(1, keepdim=True))
    spread = x.error + _gamma(K + _TERM_ROUNDINGS) * x.magnitude
    # Some rows at a time: magnitudes of all would be as large as the weight.
    error = torch.cat([spread @ rows.abs().T for rows in torch.split(weight, _ROWS)], 1)
    # The sum of all magnitudes, which partial sums do not exceed.
    sums = error / _gamma(K + _TERM_ROUNDINGS)
    error = torch.where(sums <= _FLOAT32_MAX, error, torch.inf)
    return bounded(x.value @ weight.T, error + underflow)


def shift(x: Bounded, summand: Tensor | float) -> Bounded:
    """`x + summand`, the summand exact."""
    total = x.value + summand
    return bounded(total, x.error + _gamma(1) * (total.abs() + x.error) + _TINY)


def clamp(x: Bounded, least: float | None, most: float) -> Bounded:
    """`x` where it is within the limits, else the one it is beyond."""
    rounding = abs(torch.tensor(most, dtype=torch.float32).item() - most)
    return Bounded(value=x.value.clamp(least, most), error=x.error + rounding)


def multiply(x: Bounded, y: Bounded) -> Bounded:
    """`x * y`, elementwise."""
    product = x.value * y.value
    spread = x.error * y.value.abs() + x.value.abs() * y.error + x.error * y.error
    return bounded(product, spread + _gamma(2) * (product.abs() + spread) + _TINY)


def silu(x: Bounded, alpha: float = 1.0) -> Bounded:
    """`x * sigmoid(alpha * x)`, elementwise."""
    value = x.value * torch.sigmoid(alpha * x.value)
    moved = _SILU_SLOPE * x.error
    rounding = torch.full_like(value, _gamma(_SILU_ROUNDINGS))
    if alpha != 1:
        reach = (alpha * x.magnitude).clamp(max=_SILU_REACH)
        rounding += torch.expm1(reach * _gamma(2))
    tiny = _SILU_TINY * max(1, 1 / alpha)
    return bounded(value, moved + rounding * (value.abs() + moved) + tiny)


def gelu(x: Bounded, *, by_tanh: bool = False) -> Bounded:
    """GELU, exactly by erf or as defined by tanh."""
    value = torch.nn.functional.gelu(x.value, approximate="tanh" if by_tanh else "none")
    error = _GELU_SLOPE * x.error + _gamma(_GELU_ROUNDINGS) * x.magnitude + _TINY
    return bounded(value, error)


def relu2(x: Bounded) -> Bounded:
    """`relu(x)**2`, elementwise."""
    positive = x.value.relu()
    spread = 2 * positive * x.error + x.error.square()
    square = positive.square()
    return bounded(square, spread + _gamma(1) * (square + spread) + _TINY)


FUNCTIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "relu2")
"""Names that `activation` knows."""


def activation(
    name: str, *, gated: bool = True, alpha: float = 1.0, limit: float | None = None
) -> Activate:
    """The function of gate and up between the GEMMs.

    Args:
        name: one of FUNCTIONS; all but two are that function of gate, times up. swigluoai is
            `gate * sigmoid(alpha * gate) * (up + 1)`, swiglustep `min(silu(gate), limit) * up`.
        gated: else it is the function of up alone, clamped from above alone.
        alpha: as above.
        limit: clamps gate to at most this, before all else but in swiglustep, and up to +-this.
    """
    functions = {
        "silu": silu,
        "gelu": gelu,
        "gelu_tanh": lambda x: gelu(x, by_tanh=True),
        "swigluoai": lambda x: silu(x, alpha),
        "swiglustep": lambda x: clamp(silu(x), None, float(limit or "inf")),
        "relu2": relu2,
    }
    function = functions[name]

    def of_up(gate: Bounded | None, up: Bounded) -> Bounded:
        return function(up if limit is None else clamp(up, None, limit))

    def activate(gate: Bounded | None, up: Bounded) -> Bounded:
        assert gate is not None, "a gated function has a gate"
        if limit is not None:
            gate = gate if name == "swiglustep" else clamp(gate, None, limit)
            up = clamp(up, -limit, limit)
        return multiply(function(gate), shift(up, 1.0) if name == "swigluoai" else up)

    return activate if gated else of_up


def evaluate_layer(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Callable[[str, int], Tensor],
    *,
    gated: bool = True,
    bias: Callable[[str, int], Tensor] | None = None,
    activate: Activate | None = None,
    watch: Callable[[Tensor], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluate a layer of experts, activations not quantized.

    Args:
        hidden: [M, H], exact values.
        topk_ids: [M, T] integer; a negative id contributes nothing.
        topk_weights: [M, T].
        weight: gives "gate" [I, H], "up" [I, H] or "down" [H, I] of an expert, float64; asked once
            for each, of experts that are used.
        gated: whether experts have a gate.
        bias: likewise gives a bias, [I], [I] or [H] float64, exact; None if there are none.
        activate: the function of gate and up, as `activation` gives it; by default that of silu.
        watch: told the inputs of down of each expert, [R, I] float64.

    Returns:
        output [M, H] float64, and the bound [M, H] float64 on |evaluation - output|; infinite where
        an evaluation in float32 may overflow.
    """
    x = hidden.double()
    value, magnitude, error = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    activate = activate or activation("silu")

    def linear(projection: str, rows: Bounded, e: int) -> Bounded:
        y = project(rows, weight(projection, e))
        return y if bias is None else shift(y, bias(projection, e))

    for e in sorted(set(topk_ids.flatten().tolist())):
        if e < 0:
            continue
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        rows = exact(x[token])
        gate = linear("gate", rows, e) if gated else None
        between = activate(gate, linear("up", rows, e))
        if watch is not None:
            watch(between.value)
        y = linear("down", between, e)
        w = topk_weights.double()[token, slot, None]
        value.index_add_(0, token, w * y.value)
        magnitude.index_add_(0, token, w.abs() * y.magnitude)
        error.index_add_(0, token, w.abs() * y.error + _TINY)
    output = bounded(value, error + _gamma(topk_ids.shape[1] + 1) * magnitude)
    return output.value, output.error


def _gamma(n: int) -> float:
    """Bound on the relative error of n float32 roundings."""
    return n * _U / (1 - n * _U)
