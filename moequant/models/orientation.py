"""How the numbers of a tensor lie, in words: for people, and for what reads `moequant inspect`.

N are rows, the outputs of a linear layer, K its columns; E is the experts of a layer. A product in
brackets is one dimension: [E*N, K] are the experts one below the other.
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
_WAYS = {False: ("N", "K"), True: ("K", "N")}


def orientation(
    architecture: Architecture,
    moe: MoeConfig,
    role: TensorRole,
    shape: tuple[int, ...],
    *,
    converted: bool = False,
) -> str | None:
    """How a tensor lies; None for what is no linear layer's.

    Args:
        architecture: what it is of.
        moe: its sizes.
        role: the tensor's.
        shape: its extents, which decide where the table leaves it open.
        converted: whether it is a part of a converted weight; those are never transposed.
    """
    stacked = architecture.stacked
    if stacked is not None and role.projection is not None and role.expert is None:
        order = _order(stacked, role.projection)
        if role.role == EXPERT_BIAS:
            return f"[E, N]{order}"
        if role.role == ROUTED_EXPERTS:
            ways = [False] if converted else _ways(stacked, moe, role.projection, shape)
            flat = stacked.flat and not converted
            return " or ".join(_dimensions(turned, flat) for turned in ways) + order
    if role.role in _LINEAR_ROLES and (converted or len(shape) == 2):
        return "[N, K]"
    return None


def _ways(
    stacked: StackedExperts, moe: MoeConfig, stack: str, shape: tuple[int, ...]
) -> list[bool]:
    """Whether it is transposed; both where nothing tells."""
    said = stacked.transposed(stack)
    if said is not None:
        return [said]
    ways = [t for t in (False, True) if stacked.shape(stack, moe, transposed=t) == shape]
    return ways or [False, True]


def _dimensions(turned: bool, flat: bool) -> str:
    rows, columns = _WAYS[turned]
    return f"[E*{rows}, {columns}]" if flat else f"[E, {rows}, {columns}]"


def _order(stacked: StackedExperts, stack: str) -> str:
    """How the rows of gate and of up stand, where they share a tensor."""
    if stack != "gate_up":
        return ""
    return ", N: gate and up in turns" if stacked.interleaved else ", N: gate, then up"
