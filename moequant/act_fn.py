"""Activation functions of experts, evaluated in float32 between the two GEMMs.

| name | gated | not gated |
|---|---|---|
| silu | gate * sigmoid(gate) * up | up * sigmoid(up) |
| gelu | gelu(gate) * up, gelu by erf | gelu(up) |
| gelu_tanh | gelu(gate) * up, gelu by tanh | gelu(up) |
| swigluoai | gate * sigmoid(alpha * gate) * (up + beta) | - |
| swiglustep | min(gate * sigmoid(gate), limit) * up | - |
| situ | saturate(gate, beta) * sigmoid(gate) * saturate(up, linear_beta) | - |
| relu2 | relu(gate)**2 * up | relu(up)**2 |

saturate(x, b) is b * tanh(x / b). `limit` clamps the argument of the function from above (in
swiglustep its result), and a gated up on both sides.

Sources: vLLM's `apply_moe_activation`, where swigluoai with a beta is SWIGLUOAI_UNINTERLEAVE;
gpt-oss for swigluoai, Step-3.5 for swiglustep, Kimi-K3's `SituAndMul` for situ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _times_sigmoid(x: Tensor, z: Tensor) -> Tensor:
    # Written out: torch's own silu and sigmoid round differently in the last elements of a vector
    # loop, so that a value would depend on its position.
    return x / (1 + torch.exp(-z))


def _saturate(x: Tensor, bound: float) -> Tensor:
    return bound * torch.tanh(x / bound)


_FUNCTIONS: dict[str, Callable[[Tensor, ActFn], Tensor]] = {
    "silu": lambda x, f: _times_sigmoid(x, x),
    "gelu": lambda x, f: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
    # (1 + tanh(z)) / 2 is sigmoid(2 z).
    "gelu_tanh": lambda x, f: _times_sigmoid(
        x, math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)
    ),
    "swigluoai": lambda x, f: _times_sigmoid(x, f.alpha * x),
    "swiglustep": lambda x, f: _times_sigmoid(x, x).clamp(max=f.limit),
    "situ": lambda x, f: _times_sigmoid(_saturate(x, f.beta), x),
    "relu2": lambda x, f: x.relu().square(),
}
NAMES = tuple(_FUNCTIONS)
GATED_ONLY = ("swigluoai", "swiglustep", "situ")
"""Functions that are not defined without a gate."""

_NUMBERS = {
    "limit": (None, NAMES),
    "alpha": (1.0, ("swigluoai",)),
    "beta": (1.0, ("swigluoai", "situ")),
    "linear_beta": (None, ("situ",)),
}
"""Default of each number, and the functions that have it."""
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Kernels compute with normal float32 numbers only."""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActFn:
    """An activation function of experts.

    One read from config.json may have any name and numbers; `check` says whether the runtime
    computes it.

    Attributes:
        name: one of NAMES, else the name in config.json.
        gated: whether the function of gate multiplies up; else there is no gate, and it is the
            function of up.
        limit: upper bound of gate, or of swiglustep's function of it, and bound of a gated up on
            both sides; None for no bound. swiglustep needs one.
        alpha: factor within the sigmoid of swigluoai; 1 for the others.
        beta: summand of up in swigluoai, bound of gate in situ; 1 for the others.
        linear_beta: bound of up in situ; None for no bound.
    """

    name: str
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 1.0
    linear_beta: float | None = None

    def check(self) -> None:
        """Check that the runtime computes this function.

        Raises:
            UnsupportedError: an unknown name, a function without the gate it needs, a number that
                the function does not have or float32 does not hold, or a bound that is not
                positive.
        """
        if self.name not in NAMES:
            raise UnsupportedError(
                f"activation function {self.name!r}, but the runtime computes {', '.join(NAMES)}"
            )
        if self.name in GATED_ONLY and not self.gated:
            raise UnsupportedError(f"activation function {self.name} is always gated")
        if self.name == "swiglustep" and self.limit is None:
            raise UnsupportedError("activation function swiglustep clamps, so it needs a limit")
        if not isinstance(self.gated, bool):
            raise UnsupportedError(f"gated is {self.gated!r}, but it must be True or False")
        for field, (absent, functions) in _NUMBERS.items():
            value = getattr(self, field)
            if value is None and absent is None:
                continue
            is_bound = absent is None or (field, self.name) == ("beta", "situ")
            least = _LEAST if is_bound else -_MOST
            if not (_is_number(value) and least <= value <= _MOST):
                or_none = ", or None" if absent is None else ""
                raise UnsupportedError(
                    f"{field} is {value!r}, but it must be {'positive' if is_bound else 'a number'}"
                    f", and finite in float32{or_none}"
                )
            if self.name not in functions and value != absent:
                raise UnsupportedError(
                    f"{field} {value}: activation function {self.name} has none; leave it at "
                    f"{absent}"
                )

    def __call__(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """The function of float32 `gate` and `up` of one shape; `gate` is None if not gated."""
        x = up if gate is None else gate
        if self.limit is not None:
            x = x if self.name == "swiglustep" else x.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        y = _FUNCTIONS[self.name](x, self)
        return y if gate is None else y * self._factor(up)

    def _factor(self, up: Tensor) -> Tensor:
        """The factor that a gated function makes of up."""
        if self.name == "swigluoai":
            return up + self.beta
        return up if self.linear_beta is None else _saturate(up, self.linear_beta)

    def __str__(self) -> str:
        parts = [self.name] if self.gated else [self.name, "not gated"]
        numbers = ((field, getattr(self, field), absent) for field, (absent, _) in _NUMBERS.items())
        parts += [f"{field} {value:g}" for field, value, absent in numbers if value != absent]
        return ", ".join(parts)


SILU = ActFn(name="silu")
SWIGLUOAI = ActFn(name="swigluoai", alpha=1.702, limit=7.0)
"""Of gpt-oss; numbers from its released configuration and code."""
SITU = ActFn(name="situ", beta=4.0, linear_beta=25.0)
"""Of Kimi-K3; numbers from its config.json."""
RELU2 = ActFn(name="relu2", gated=False)
"""Of Nemotron-H."""
