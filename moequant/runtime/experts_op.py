"""moequant::fused_experts, the operator that torch.compile sees instead of FusedExperts.forward.

An operator takes tensors and plain values only, so it names the module by a handle.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moequant.errors import UnsupportedError
from moequant.runtime.no_gradient import gradient_of_experts

_MODULES: WeakValueDictionary[int, Any] = WeakValueDictionary()
_HANDLES = count()


def handle_of(module: object) -> int:
    """A number for `module` that no other module of this process has or had."""
    handle = next(_HANDLES)
    _MODULES[handle] = module
    return handle


@torch.library.custom_op("moequant::fused_experts", mutates_args=())
def fused_experts(
    handle: int,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    activations: str | None,
    hidden_scale: Tensor | None,
) -> Tensor:
    """`FusedExperts.run` of the module that has `handle`."""
    output: Tensor = _MODULES[handle].run(
        hidden_states,
        topk_weights,
        topk_ids,
        expert_map,
        apply_router_weight_on_input,
        activations,
        hidden_scale,
    )
    return output


@fused_experts.register_fake
def _(
    handle: int,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    activations: str | None,
    hidden_scale: Tensor | None,
) -> Tensor:
    # Not in forward: Dynamo of torch 2.11 takes is_exporting() for true under torch.compile too.
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            "torch.export of experts: a saved program would not hold them; export the rest of "
            "the model, or run it under torch.compile"
        )
    dtype = hidden_states.dtype if hidden_scale is None else torch.bfloat16
    return torch.empty_like(hidden_states, dtype=dtype, memory_format=torch.contiguous_format)


def _keep_shapes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shapes = [x.shape if isinstance(x, Tensor) else None for x in inputs]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    # Tensors, not None: what needs no operator would be left out of a compiled graph.
    return tuple(
        gradient_of_experts(gradient, shape) if needed else None
        for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
    )


fused_experts.register_autograd(_backward, setup_context=_keep_shapes)
