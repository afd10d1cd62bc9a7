"""The orientation of a tensor in words, such as [E, K, N], for `moequant inspect`.

N is the output rows of a linear layer, K its input columns, E the experts of a layer. A product is
one dimension: [E*N, K] holds the experts one below the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.models.architecture import CONVERTIBLE_ROLES, EXPERT_BIAS, ROUTED_EXPERTS

if TYPE_CHECKING:
    from moequant.models.architecture import Architecture, TensorRole
    from moequant.models.moe_config import MoeConfig

_LINEAR_ROLES = (*CONVERTIBLE_ROLES, "router", "lm_head")


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
    stacked, stack = architecture.stacked, role.projection
    if stacked is None or stack is None or role.expert is not None:
        is_linear = role.role in _LINEAR_ROLES and (converted or len(shape) == 2)
        return "[N, K]" if is_linear else None
    order = ""
    if stack == "gate_up":
        order = ", N: gate and up interleaved" if stacked.interleaved else ", N: gate, then up"
    if role.role == EXPERT_BIAS:
        return f"[E, N]{order}"
    assert role.role == ROUTED_EXPERTS, role
    experts = "E*" if stacked.flat and not converted else "E, "
    words = {False: f"[{experts}N, K]", True: f"[{experts}K, N]"}
    possible = [False] if converted else stacked.orientations(stack, moe, shape)
    return " or ".join(words[transposed] for transposed in possible or (False, True)) + order
