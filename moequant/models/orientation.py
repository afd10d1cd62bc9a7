"""The orientation of a tensor in words, such as [E, K, N], for `moequant inspect`.

N is the output rows of a linear layer, K its input columns, E the experts of a layer. A product is
one dimension: [E*N, K] holds the experts one below the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.models.architecture import (
    CONVERTIBLE_ROLES,
    EXPERT_BIAS,
    ROUTED_EXPERTS,
)

if TYPE_CHECKING:
    from moequant.models.architecture import Architecture, TensorRole
    from moequant.models.moe_config import MoeConfig
    from moequant.models.stacked import StackedExperts

_LINEAR_ROLES = (*CONVERTIBLE_ROLES, "router", "lm_head")
_DIMENSIONS = {False: ("N", "K"), True: ("K", "N")}


def orientation(
    architecture: Architecture,
    moe: MoeConfig,
    role: TensorRole,
    shape: tuple[int, ...],
    *,
    converted: bool = False,
) -> str | None:
    """The orientation of a tensor; None if it does not belong to a linear layer.

    Args:
        architecture: the checkpoint's architecture.
        moe: the checkpoint's sizes.
        role: the tensor's role.
        shape: the tensor's shape, which decides where the description does not.
        converted: whether it is part of a converted weight; those are never transposed.
    """
    stacked = architecture.stacked
    if stacked is not None and role.projection is not None and role.expert is None:
        order = _order(stacked, role.projection)
        if role.role == EXPERT_BIAS:
            return f"[E, N]{order}"
        if role.role == ROUTED_EXPERTS:
            possible = [False] if converted else _possible(stacked, moe, role.projection, shape)
            flat = stacked.flat and not converted
            return " or ".join(_dimensions(transposed, flat) for transposed in possible) + order
    if role.role in _LINEAR_ROLES and (converted or len(shape) == 2):
        return "[N, K]"
    return None


def _possible(
    stacked: StackedExperts, moe: MoeConfig, stack: str, shape: tuple[int, ...]
) -> list[bool]:
    """Whether the stack is transposed; both answers if neither table nor shape decides."""
    declared = stacked.transposed(stack)
    if declared is not None:
        return [declared]
    fitting = [t for t in (False, True) if stacked.shape(stack, moe, transposed=t) == shape]
    return fitting or [False, True]


def _dimensions(transposed: bool, flat: bool) -> str:
    rows, columns = _DIMENSIONS[transposed]
    return f"[E*{rows}, {columns}]" if flat else f"[E, {rows}, {columns}]"


def _order(stacked: StackedExperts, stack: str) -> str:
    """The order of gate and up rows where they share a tensor."""
    if stack != "gate_up":
        return ""
    return ", N: gate and up interleaved" if stacked.interleaved else ", N: gate, then up"
