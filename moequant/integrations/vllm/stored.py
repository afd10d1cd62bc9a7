"""Experts of a layer as parameters that vLLM's loader fills, and as weights once they are filled.

Decisions, each with the failure it prevents:

* Parameters begin with zeros. Otherwise rows that a rank has no weights for, as of gpt-oss by four
  ranks, would hold whatever was in memory.
* Every tensor is checked before vLLM's loader copies it. Otherwise `copy_` would round scales,
  read E8M0 scales as numbers, or spread one scale over a row.
* What was loaded is counted. Otherwise an expert that the files lack would run as zeros.
* Weights are views of the parameters. Otherwise a layer would be in memory twice before packing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from moequant.act_fn import ActFn
    from moequant.integrations.vllm.scheme import ExpertScheme
    from moequant.runtime import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """Sizes of a layer's experts on one rank.

    Attributes:
        experts: E, of this rank.
        hidden: H.
        intermediate: I of this rank: of `tp_size` ranks each has this many.
        tp_size: ranks that share each expert.
        gated: whether there is a gate.
    """

    experts: int
    hidden: int
    intermediate: int
    tp_size: int
    gated: bool

    @property
    def halves(self) -> int:
        """How many matrices w13 holds for each expert."""
        return 2 if self.gated else 1


class StoredExperts(ABC):
    """The parameters of one layer: made, filled by vLLM's loader, and read as weights.

    Args:
        name: of the layer, for errors.
        scheme: how its experts are stored.
        sizes: of its experts on this rank.
    """

    def __init__(self, name: str, scheme: ExpertScheme, sizes: RankSizes) -> None:
        self.name = name
        self.scheme = scheme
        self.sizes = sizes
        self._expected: dict[str, int | None] = {}
        self._loaded: dict[str, set[object]] = {}

    @abstractmethod
    def create(self, layer: nn.Module, weight_loader: Callable[..., object]) -> None:
        """Register the parameters on torch's default device, named as vLLM maps tensors' names.

        Args:
            layer: gets them.
            weight_loader: vLLM's, a method of the layer.
        """

    @abstractmethod
    def weights(self, layer: nn.Module, act_fn: ActFn, *, input_scales: bool) -> ExpertWeights:
        """The weights in the parameters, as views; may be called once.

        Args:
            layer: has the parameters.
            act_fn: the function between the GEMMs.
            input_scales: whether static scales of activations belong to them.

        Raises:
            CheckpointError: a value that the format does not have.
        """

    def check_loaded(self) -> None:
        """Check that every tensor of every expert of this rank was loaded.

        Raises:
            CheckpointError: one is missing.
        """
        for parameter, expected in self._expected.items():
            found = len(self._loaded[parameter])
            if expected is not None and found != expected:
                raise CheckpointError(
                    f"{self.name}: {found} of {expected} tensors of {parameter} were loaded; the "
                    "checkpoint lacks the others. Fetch or convert it again"
                )

    def free(self, layer: nn.Module) -> None:
        """Delete the parameters from the layer."""
        for parameter in self._expected:
            delattr(layer, parameter)

    def _register(
        self,
        layer: nn.Module,
        parameter: str,
        data: Tensor,
        expected: int | None,
        **attributes: object,
    ) -> None:
        """Make `data` a parameter that `expected` tensors fill, with attributes for the loader.

        None stands for tensors that files may lack.
        """
        made = torch.nn.Parameter(data, requires_grad=False)
        for key, value in attributes.items():
            setattr(made, key, value)
        layer.register_parameter(parameter, made)
        self._expected[parameter] = expected
        self._loaded[parameter] = set()

    def _note(self, parameter: str, what: object) -> None:
        """Count a tensor as loaded."""
        self._loaded[parameter].add(what)
