"""Mean squares of the inputs of experts, predicted from weights alone.

The norm in front of the experts divides a token by its root mean square and multiplies channel k by
w_k. So the mean square of channel k is w_k**2 where channels were equally large before; that is
what is assumed, and that they are independent and Gaussian with mean 0.

Then gate and up of a neuron are Gaussian too, with the variances and the covariance that their rows
give, and the mean square of act(gate) * up is an integral over two Gaussians. It is computed by
the trapezoidal rule at 17 points each, from -6 to 6 standard deviations. For smooth functions that
is exact to 1e-6; where a function has a bend, as one with a limit, it is off by a few per cent, and
by more if the limit is less than a standard deviation.

Sums over columns are made by adding halves, element by element, so that they have the same bits on
every machine. Functions such as exp have not; so the result is rounded to bfloat16's 8 bits, and
differs only where a number is within about 1e-14 of the middle between two.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moequant.act_fn import ActFn

TILE_WEIGHTS = 1 << 19
"""Weights of a matrix that are multiplied at once."""
TILE_BYTES = 8 * 4 * TILE_WEIGHTS
"""Upper bound of the temporary memory of `intermediate_mean_square`, for a few thousand columns."""
_STEP, _STEPS = 0.75, 8
_LARGEST = 1e30


@cache
def _nodes() -> tuple[tuple[float, float], ...]:
    """Points of the trapezoidal rule for an integral over N(0, 1), and their weights."""
    points = [_STEP * i for i in range(-_STEPS, _STEPS + 1)]
    return tuple((z, math.exp(-z * z / 2)) for z in points)


def hidden_mean_square(norm: Tensor, offset: float) -> Tensor:
    """The mean squares of hidden states behind a norm.

    Args:
        norm: [H], the norm's weight.
        offset: what the norm adds to its weight.

    Returns:
        [H] float32.
    """
    return (norm.float() + offset).square()


def intermediate_mean_square(
    gate: Tensor | None, up: Tensor, hidden: Tensor, act_fn: ActFn
) -> Tensor:
    """The mean squares of what down multiplies, over the largest of them.

    Args:
        gate: [I, H]; None where experts have no gate.
        up: [I, H].
        hidden: [H] float32, the mean squares of the hidden states.
        act_fn: of gate and up.

    Returns:
        [I] float32, numbers of bfloat16 from 0 to 1; all 0 where all are.
    """
    tiles = [_second_moments(*rows, hidden) for rows in _row_tiles(gate, up)]
    gates, ups, products = (torch.cat(parts).double() for parts in zip(*tiles, strict=True))
    square = _mean_square(gates, ups, products, act_fn)
    largest = square.amax() if len(square) else square.sum()
    relative = torch.where(largest > 0, square / largest, square)
    return relative.to(torch.bfloat16).float()


def _row_tiles(gate: Tensor | None, up: Tensor) -> Iterator[tuple[Tensor | None, Tensor]]:
    height = max(1, TILE_WEIGHTS // max(up.shape[1], 1))
    for start in range(0, len(up), height):
        rows = slice(start, start + height)
        yield None if gate is None else gate[rows].float(), up[rows].float()


def _second_moments(
    gate: Tensor | None, up: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """E[gate**2], E[up**2] and E[gate * up] of each neuron, [rows] float32."""
    of_up = _sum_columns(up * up * hidden)
    if gate is None:
        return of_up, of_up, of_up
    return _sum_columns(gate * gate * hidden), of_up, _sum_columns(gate * up * hidden)


def _sum_columns(x: Tensor) -> Tensor:
    """The sums of rows [N, K]; the order of additions depends on K alone."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        rest = x[:, 2 * half :]
        x = torch.cat([x[:, :half] + x[:, half : 2 * half], rest], 1)
    total = x[:, 0] if x.shape[1] else x.sum(1)
    # Squares of weights beyond 1e19, of any sign, overflow.
    return total.nan_to_num(0.0, _LARGEST, -_LARGEST).clamp(-_LARGEST, _LARGEST)


def _mean_square(gates: Tensor, ups: Tensor, products: Tensor, act_fn: ActFn) -> Tensor:
    """E[act_fn(gate, up)**2] of Gaussian gate and up, up to a factor: [I] float64.

    `gates`, `ups` and `products` are their second moments.
    """
    gate_std, up_std = gates.sqrt(), ups.sqrt()
    total = torch.zeros_like(ups)
    if not act_fn.gated:
        for z, weight in _nodes():
            total += weight * act_fn(None, z * up_std).square()
        return total
    both = gate_std * up_std
    correlation = torch.where(both > 0, products / both, both).clamp(-1, 1)
    apart = (1 - correlation.square()).sqrt()
    for z, weight in _nodes():
        gate = z * gate_std
        for other, other_weight in _nodes():
            up = up_std * (correlation * z + apart * other)
            total += weight * other_weight * act_fn(gate, up).square()
    return total
