"""See what the experts of a transformers model multiply, whatever their class is.

While a layer runs, every matrix product whose second operand lies in the weights of the layer's
experts is looked at: the position in the weights says which expert, and the parameter which
projection. So what is seen is what the model computes with, also where a class scales tokens before
the experts or calls the function between gate, up and down something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from moequant.errors import UnsupportedError
from moequant.statistics import input_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn

    Observe = Callable[[str, int, Tensor], None]

# By name: torch has each of these as a function, a method and an operator.
_PRODUCTS = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm"})


class ExpertInputs(TorchFunctionMode):
    """Observes products with the experts' weights for as long as the context lasts.

    Args:
        layer: a layer whose weights are loaded.
        parameters: which of its parameters hold which projections, as
            `LayerwiseModel.expert_parameters` says.
        experts: number of experts.
        observe: called with the input's name, `hidden` or `intermediate`, the index of an expert,
            and its rows [n, K].

    Raises:
        UnsupportedError: a parameter does not hold one weight after the other.
    """

    def __init__(
        self,
        layer: nn.Module,
        parameters: Mapping[str, Iterable[str]],
        *,
        experts: int,
        observe: Observe,
    ) -> None:
        super().__init__()
        self._observe = observe
        self._experts = experts
        self._stacks: dict[int, _Stack] = {}
        for name, projections in parameters.items():
            weight = layer.get_parameter(name)
            if weight.numel() % experts or not weight.is_contiguous():
                raise UnsupportedError(
                    f"{type(layer).__name__}: {name} {list(weight.shape)} is no stack of {experts} "
                    "experts, so it cannot be told which of them a product is of"
                )
            # Gate and up multiply the same; every expert has an up.
            if "up" in projections or "down" in projections:
                kind = input_of("down" if "down" in projections else "up")
                stack = _Stack(name=kind, weight=weight, size=weight.numel() // experts)
                self._stacks[weight.untyped_storage().data_ptr()] = stack

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at a product, and compute it."""
        if func.__name__ in _PRODUCTS and len(args) > 1 and isinstance(args[1], torch.Tensor):
            stack = self._stacks.get(args[1].untyped_storage().data_ptr())
            if stack is not None:
                self._see(args[0], args[1], stack)
        return func(*args, **(kwargs or {}))

    def _see(self, inputs: Tensor, weight: Tensor, stack: _Stack) -> None:
        offset = weight.storage_offset() - stack.weight.storage_offset()
        if weight.numel() <= stack.size:
            self._observe(stack.name, offset // stack.size, inputs.reshape(-1, inputs.shape[-1]))
            return
        # All experts at once, with zeros for tokens that are not routed to one.
        assert len(weight) == len(inputs) == self._experts, (weight.shape, inputs.shape)
        for expert, rows in enumerate(inputs):
            self._observe(stack.name, expert, rows[rows.any(-1)])


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """A parameter that holds a weight of every expert.

    Attributes:
        name: of the input.
        weight: the parameter.
        size: elements of one expert.
    """

    name: str
    weight: Tensor
    size: int
