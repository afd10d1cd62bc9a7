"""A layer of experts evaluated a second time: plain loops in float64, with a bound.

Nothing here comes from the runtime or the formats, so that a mistake there cannot hide itself.

What is computed is the exact layer, and beside every number a bound on how far a correct float32
evaluation can lie from it. Derivation, with u = 2**-24, gamma(n) = n u / (1 - n u) (Higham,
"Accuracy and Stability of Numerical Algorithms", chapters 2 and 3), dx the bound on an input x:

* An inner product of K terms, summed in any order, fused or not, is off by gamma(K) sum |x| |w| at
  most. Three more roundings of relative size u may sit in each term: two where a weight is decoded,
  code times scale times global scale, and one where an activation is formed. With the input off,
  dy = sum (dx + gamma(K + 3) (|x| + dx)) |w|.
* silu has a slope of at most 1.1 (1.0998, at 2.4). Computed as x / (1 + exp(-x)) with an
  exponential good to 2 ulp, s = silu(x) is off by 8 u |s| at most: 4 u from the exponential, u each
  from addition and division, and second orders. Where exp(-x) overflows the result is 0, and s no
  larger than 2.7e-37 < 24 * 2**-126. So ds = 1.1 dx + gamma(8) (|s| + 1.1 dx) + 24 * 2**-126.
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

_U = 2.0**-24
_TINY = 2.0**-126
_SILU_SLOPE = 1.1
_SILU_ROUNDINGS = 8
_SILU_TINY = 24 * _TINY
_TERM_ROUNDINGS = 3 + 1


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """An exact value and how far a float32 evaluation of it can be off.

    Attributes:
        value: [...] float64.
        error: [...] float64, at least 0.
    """

    value: Tensor
    error: Tensor

    @property
    def magnitude(self) -> Tensor:
        """What the float32 evaluation does not exceed in magnitude."""
        return self.value.abs() + self.error


def exact(value: Tensor) -> Bounded:
    """A value that float32 holds exactly."""
    value = value.double()
    return Bounded(value=value, error=torch.zeros_like(value))


def project(x: Bounded, weight: Tensor) -> Bounded:
    """`x @ weight.T` of [R, K] and [N, K] float64: [R, N]."""
    K = weight.shape[1]
    magnitude = weight.abs().T
    # Terms, and decoded weights times their activation, may underflow.
    underflow = 2 * _TINY * (K + x.magnitude.sum(1, keepdim=True))
    error = (x.error + _gamma(K + _TERM_ROUNDINGS) * x.magnitude) @ magnitude
    return Bounded(value=x.value @ weight.T, error=error + underflow)


def swiglu(gate: Bounded, up: Bounded) -> Bounded:
    """`silu(gate) * up`, elementwise."""
    silu = gate.value * torch.sigmoid(gate.value)
    moved = _SILU_SLOPE * gate.error
    error = moved + _gamma(_SILU_ROUNDINGS) * (silu.abs() + moved) + _SILU_TINY
    product = silu * up.value
    spread = error * up.value.abs() + silu.abs() * up.error + error * up.error
    return Bounded(value=product, error=spread + _gamma(2) * (product.abs() + spread) + _TINY)


def evaluate_expert(x: Bounded, gate: Tensor, up: Tensor, down: Tensor) -> Bounded:
    """One expert, [I, H], [I, H] and [H, I] float64, on rows [R, H]: [R, H]."""
    return project(swiglu(project(x, gate), project(x, up)), down)


def evaluate_layer(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    gate: Callable[[int], Tensor],
    up: Callable[[int], Tensor],
    down: Callable[[int], Tensor],
) -> tuple[Tensor, Tensor]:
    """Evaluate a layer of experts, activations not quantized.

    Args:
        hidden: [M, H], exact values.
        topk_ids: [M, T] integer; a negative id contributes nothing.
        topk_weights: [M, T].
        gate: weight [I, H] float64 of an expert; each is asked for once, and only if used.
        up: likewise [I, H].
        down: likewise [H, I].

    Returns:
        output [M, H] float64, and the bound [M, H] float64 on |evaluation - output|.
    """
    x, weight = hidden.double(), topk_weights.double()
    value, magnitude, error = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for e in sorted(set(topk_ids.flatten().tolist())):
        if e < 0:
            continue
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        y = evaluate_expert(exact(x[token]), gate(e), up(e), down(e))
        w = weight[token, slot, None]
        value.index_add_(0, token, w * y.value)
        magnitude.index_add_(0, token, w.abs() * y.magnitude)
        error.index_add_(0, token, w.abs() * y.error + _TINY)
    error += _gamma(topk_ids.shape[1] + 1) * magnitude
    return value, error


def _gamma(n: int) -> float:
    """Bound on the relative error of n float32 roundings."""
    return n * _U / (1 - n * _U)
