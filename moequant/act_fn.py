"""What lies between the two GEMMs of an expert: the activation function, in float32.

| name | gated | not gated |
|---|---|---|
| silu | gate * sigmoid(gate) * up | up * sigmoid(up) |
| gelu | gelu(gate) * up, gelu by erf | gelu(up) |
| gelu_tanh | gelu(gate) * up, gelu by tanh | gelu(up) |
| swigluoai | gate * sigmoid(alpha * gate) * (up + beta) | - |
| swiglustep | min(gate * sigmoid(gate), limit) * up | - |
| situ | saturate(gate, beta) * sigmoid(gate) * saturate(up, linear_beta) | - |
| relu2 | relu(gate)**2 * up | relu(up)**2 |

saturate(x, b) is b * tanh(x / b). `limit` clamps what goes in: the argument of the function from
above, but in swiglustep its result; a gated up on both sides.

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
    from torch import Tensor

NAMES = ("silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "situ", "relu2")
GATED_ONLY = ("swigluoai", "swiglustep", "situ")
"""Those that are not defined without a gate."""


_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Of the numbers below, which kernels compute with: normal ones of float32."""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActFn:
    """An activation function of experts.

    One that a config.json describes may have any name and numbers; `check` says whether we compute
    it, and `ExpertWeights` asks.

    Attributes:
        name: one of NAMES, else the name that config.json has for it.
        gated: whether it multiplies by up; else there is no gate, and it is of up.
        limit: clamps gate, or swiglustep's function of it, to at most this, and a gated up to
            +-this; None does not. swiglustep needs one.
        alpha: factor within the sigmoid of swigluoai; 1 for the others.
        beta: of swigluoai, what is added to up; of situ, the bound of gate; 1 for the others.
        linear_beta: of situ, the bound of up, or None, which leaves up as it is.
    """

    name: str
    gated: bool = True
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 1.0
    linear_beta: float | None = None

    def check(self) -> None:
        """Refuse what we do not compute.

        Raises:
            UnsupportedError: no function is called that, one that is always gated is not, a number
                is given to a function that has none such, one is no number or none that float32
                holds, or a bound is not positive.
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
        self._check_number("alpha", self.alpha, 1.0, of=("swigluoai",))
        self._check_number("beta", self.beta, 1.0, of=("swigluoai", "situ"))
        self._check_number("linear_beta", self.linear_beta, None, of=("situ",))
        bounds = {"limit": self.limit, "linear_beta": self.linear_beta}
        if self.name == "situ":
            bounds["beta"] = self.beta
        for field, bound in bounds.items():
            if bound is not None and not (_is_number(bound) and _LEAST <= bound <= _MOST):
                absent = "" if field == "beta" else ", or None"
                raise UnsupportedError(
                    f"{field} is {bound!r}, but it must be positive, and finite in float32{absent}"
                )

    def _check_number(
        self, field: str, value: float | None, absent: float | None, *, of: tuple[str, ...]
    ) -> None:
        if value is None and absent is None:
            return
        if not (_is_number(value) and -_MOST <= value <= _MOST):
            raise UnsupportedError(
                f"{field} is {value!r}, but it must be a number, finite in float32"
            )
        if self.name not in of and value != absent:
            raise UnsupportedError(
                f"{field} {value}: activation function {self.name} has none; leave it at {absent}"
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
        """What a gated function makes of up."""
        if self.name == "swigluoai":
            return up + self.beta
        return up if self.linear_beta is None else _saturate(up, self.linear_beta)

    def __str__(self) -> str:
        parts: list[str] = [self.name]
        if not self.gated:
            parts.append("not gated")
        if self.limit is not None:
            parts.append(f"limit {self.limit:g}")
        if self.alpha != 1.0:
            parts.append(f"alpha {self.alpha:g}")
        if self.beta != 1.0:
            parts.append(f"beta {self.beta:g}")
        if self.linear_beta is not None:
            parts.append(f"linear_beta {self.linear_beta:g}")
        return ", ".join(parts)


SILU = ActFn(name="silu")
SWIGLUOAI = ActFn(name="swigluoai", alpha=1.702, limit=7.0)
"""gpt-oss's; the numbers are of its released configuration and code."""
SITU = ActFn(name="situ", beta=4.0, linear_beta=25.0)
"""Kimi-K3's; the numbers are of its config.json."""
RELU2 = ActFn(name="relu2", gated=False)
"""Nemotron-H's."""


def _silu(x: Tensor, act_fn: ActFn) -> Tensor:
    # Written out: torch's own silu and sigmoid round differently in the last elements of a vector
    # loop, so that a value would depend on where it lies.
    return _silu_of(x, act_fn.alpha * x)


def _silu_of(x: Tensor, z: Tensor) -> Tensor:
    return x / (1 + torch.exp(-z))


def _gelu(x: Tensor, act_fn: ActFn) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Tensor, act_fn: ActFn) -> Tensor:
    # (1 + tanh(z)) / 2 is sigmoid(2 z).
    return _silu_of(x, math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def _swiglustep(x: Tensor, act_fn: ActFn) -> Tensor:
    return _silu(x, act_fn).clamp(max=act_fn.limit)


def _situ(x: Tensor, act_fn: ActFn) -> Tensor:
    return _silu_of(_saturate(x, act_fn.beta), x)


def _saturate(x: Tensor, bound: float) -> Tensor:
    return bound * torch.tanh(x / bound)


def _relu2(x: Tensor, act_fn: ActFn) -> Tensor:
    return x.relu().square()


_FUNCTIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "swigluoai": _silu,
    "swiglustep": _swiglustep,
    "situ": _situ,
    "relu2": _relu2,
}
