"""Experts have no gradient: a backward pass through their result is an error, not zeros.

Nothing is saved for it, and without a gradient that is asked for, a call does nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003, which torch evaluates
from typing import Any, Never

import torch
from torch import Tensor

from moequant.errors import UnsupportedError


def refuse_gradient(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """`result`, through which nothing can be propagated back to `inputs`.

    Args:
        result: computed without autograd.
        inputs: what it was computed from.

    Returns:
        `result`; where grad mode is on and an input requires a gradient, another tensor in its
        memory, whose backward pass raises UnsupportedError. Inference tensors stay what they are.
    """
    if (
        torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in inputs)
        and not result.is_inference()
    ):
        # Not `result` itself: memory that is used again would keep the graphs of earlier calls.
        alias = result.detach()
        refused: Tensor = _NoGradient.apply(alias, *inputs)  # type: ignore[no-untyped-call]
        return refused
    return result


class _NoGradient(torch.autograd.Function):
    """A tensor that depends on others, as far as autograd knows."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.mark_dirty(result)  # else it would be a view, which may not be written to
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Never:
        raise _error()


@torch.library.custom_op("moequant::gradient_of_experts", mutates_args=())
def gradient_of_experts(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """What the backward pass of a compiled graph calls; compiling it is no error.

    Args:
        gradient: of the result.
        shape: of the input.

    Raises:
        UnsupportedError: always.
    """
    raise _error()


@gradient_of_experts.register_fake
def _(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    return gradient.new_empty(shape)


def _error() -> UnsupportedError:
    return UnsupportedError(
        "a backward pass reached experts, which have no gradient: they are for inference; call "
        "them within torch.no_grad(), or detach their result, if nothing is to be learned through "
        "them, and else train the unquantized model"
    )
