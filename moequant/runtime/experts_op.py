"""moequant::fused_experts, the operator that torch.compile sees instead of FusedExperts.forward.

An operator takes tensors and plain values only, so it names the module by a handle.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moequant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable


class _Runnable(Protocol):
    @property
    def run(self) -> Callable[..., Tensor]: ...


_MODULES: WeakValueDictionary[int, _Runnable] = WeakValueDictionary()
_HANDLES = count()


def handle_of(module: _Runnable) -> int:
    """A number for `module` that no other module of this process has or had."""
    handle = next(_HANDLES)
    _MODULES[handle] = module
    return handle


@torch.library.custom_op("moequant::fused_experts", mutates_args=())
def fused_experts(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    activations: str | None,
    handle: int,
    hidden_scale: Tensor | None = None,
) -> Tensor:
    """`FusedExperts.run` of the module that has `handle`."""
    return _MODULES[handle].run(
        hidden_states,
        topk_weights,
        topk_ids,
        expert_map,
        apply_router_weight_on_input,
        activations,
        hidden_scale,
    )


@fused_experts.register_fake
def _(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    activations: str | None,
    handle: int,
    hidden_scale: Tensor | None = None,
) -> Tensor:
    # Not in forward: Dynamo of torch 2.11 takes is_exporting() for true under torch.compile too.
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            "torch.export of experts: a saved program would not hold them; export the rest of "
            "the model, or run it under torch.compile"
        )
    dtype = hidden_states.dtype if hidden_scale is None else torch.bfloat16
    return torch.empty_like(hidden_states, dtype=dtype, memory_format=torch.contiguous_format)
