"""What lies between the two GEMMs of an expert: the activation function, in float32.

| name | gated | not gated |
|---|---|---|
| silu | gate * sigmoid(gate) * up | up * sigmoid(up) |
| gelu | gelu(gate) * up, gelu by erf | gelu(up) |
| gelu_tanh | gelu(gate) * up, gelu by tanh | gelu(up) |
| swigluoai | gate * sigmoid(alpha * gate) * (up + 1) | - |
| relu2 | relu(gate)**2 * up | relu(up)**2 |

`limit` clamps what goes in: the argument of the function from above, a gated up on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

Name = Literal["silu", "gelu", "gelu_tanh", "swigluoai", "relu2"]
NAMES: tuple[str, ...] = get_args(Name)


@dataclass(frozen=True, kw_only=True)
class ActFn:
    """An activation function of experts.

    Attributes:
        name: one of NAMES.
        gated: whether it multiplies by up; else there is no gate, and it is of up.
        limit: clamps gate to at most this and a gated up to +-this; None does not.
        alpha: factor within the sigmoid of swigluoai; 1 for the others.

    Raises:
        UnsupportedError: no function is called that, swigluoai is not gated, alpha is given to
            another, or `limit` is not positive.
    """

    name: Name
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UnsupportedError(
                f"activation function {self.name!r}, but the runtime computes {', '.join(NAMES)}"
            )
        if self.name == "swigluoai" and not self.gated:
            raise UnsupportedError("activation function swigluoai is gated, always")
        if self.name != "swigluoai" and self.alpha != 1.0:
            raise UnsupportedError(
                f"alpha {self.alpha}: activation function {self.name} has none; leave it at 1"
            )
        if self.limit is not None and not self.limit > 0:
            raise UnsupportedError(f"limit is {self.limit}, but it must be positive, or None")

    def __call__(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """The function of float32 `gate` and `up` of one shape; `gate` is None if not gated."""
        x = up if gate is None else gate
        if self.limit is not None:
            x = x.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        y = _FUNCTIONS[self.name](x, self.alpha)
        if gate is None:
            return y
        return y * (up + 1) if self.name == "swigluoai" else y * up

    def __str__(self) -> str:
        parts: list[str] = [self.name]
        if not self.gated:
            parts.append("not gated")
        if self.limit is not None:
            parts.append(f"limit {self.limit:g}")
        if self.alpha != 1.0:
            parts.append(f"alpha {self.alpha:g}")
        return ", ".join(parts)


SILU = ActFn(name="silu")
SWIGLUOAI = ActFn(name="swigluoai", alpha=1.702, limit=7.0)
"""gpt-oss's; the numbers are of its released configuration and code."""
RELU2 = ActFn(name="relu2", gated=False)
"""Nemotron-H's."""


def _silu(x: Tensor, alpha: float) -> Tensor:
    # Written out: torch's own silu and sigmoid round differently in the last elements of a vector
    # loop, so that a value would depend on where it lies.
    return _silu_of(x, alpha * x)


def _silu_of(x: Tensor, z: Tensor) -> Tensor:
    return x / (1 + torch.exp(-z))


def _gelu(x: Tensor, alpha: float) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Tensor, alpha: float) -> Tensor:
    # (1 + tanh(z)) / 2 is sigmoid(2 z).
    return _silu_of(x, math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def _relu2(x: Tensor, alpha: float) -> Tensor:
    return x.relu().square()


_FUNCTIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "swigluoai": _silu,
    "relu2": _relu2,
}
