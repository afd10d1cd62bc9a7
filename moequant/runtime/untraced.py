"""Calls that torch.compile leaves alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

from torch._C._dynamo.eval_frame import get_eval_frame_callback

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")


def untraced(function: F) -> F:
    """`function`, into which torch.compile does not look.

    After torch._dynamo.config.recompile_limit kinds of call, torch.compile runs a function as it
    is, and compiles those that it calls. Experts launch kernels by addresses of tensors, which
    cannot be traced.

    `torch.compiler.disable` would do, but importing what it needs takes a second.
    """
    if get_eval_frame_callback() is None:
        return function
    wrapped: F = sys.modules["torch._dynamo"].disable(function)
    return wrapped
