"""Experts of a layer as parameters that vLLM's loader fills, and as weights once they are filled.

Decisions, each with the failure it prevents:

* Parameters begin with zeros. Otherwise rows that a rank has no weights for, as of gpt-oss by four
  ranks, would hold whatever was in memory.
* Every tensor is checked before vLLM's loader copies it. Otherwise `copy_` would round scales,
  read E8M0 scales as numbers, or spread one scale over a row.
* What was loaded is counted. Otherwise an expert that the files lack would run as zeros.
* Weights are views of the parameters. Otherwise a layer would be in memory twice before packing.
* Parameters are loaded once, and a second loading is refused at its first tensor. vLLM keeps the
  addresses of packed weights in CUDA graphs, and its `reload_weights` leaves a layer as it is whose
  loaders copy nothing, so that experts of before would run among layers of after.
* Loaders hold the layer only until its experts are packed. vLLM keeps them for as long as the
  process runs, so that an engine that is deleted would keep its experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.integrations.vllm.name import NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from moequant.act_fn import ActFn
    from moequant.integrations.vllm.scheme import ExpertScheme
    from moequant.runtime import ExpertWeights

ONE_A_MATRIX = "tensor"
"""`quant_method` of a parameter with one number for each matrix."""


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


@dataclass(frozen=True)
class _Filling:
    """What parameters are filled by, until the experts are packed.

    Attributes:
        layer: a `RoutedExperts` of vLLM.
        loader: vLLM's, a method of the layer.
    """

    layer: Any
    loader: Callable[..., object]


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
        self._filled_by: _Filling | None = None

    def create(self, layer: nn.Module, weight_loader: Callable[..., object]) -> None:
        """Register the parameters on torch's default device, named as vLLM maps tensors' names.

        Args:
            layer: gets them.
            weight_loader: vLLM's, a method of the layer.

        Raises:
            UnsupportedError: sizes that the format does not have.
        """
        self._filled_by = _Filling(layer, weight_loader)
        self._create(layer)

    @abstractmethod
    def _create(self, layer: nn.Module) -> None:
        """As `create`, by `_register`."""

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

    def fill_scales(self, layer: nn.Module) -> None:
        """Make scales of whole matrices and of activations 1, in place of a benchmark's numbers.

        Half of those that vLLM fills parameters with are negative, which no such scale may be.
        """
        for parameter in self._expected:
            filled: Any = layer.get_parameter(parameter)
            if filled.quant_method == ONE_A_MATRIX:
                filled.data.fill_(1.0)

    def free(self, layer: nn.Module) -> None:
        """Delete the parameters from the layer, and refuse what is loaded from now on."""
        for parameter in self._expected:
            delattr(layer, parameter)
        self._filled_by = None

    def refuse_loading(self) -> NoReturn:
        """Raise UnsupportedError: the experts were packed already."""
        raise UnsupportedError(
            f"{self.name}: weights are loaded again, which --quantization {NAME} does not serve; "
            "vLLM has taken the model's other weights apart by now, so start the server again"
        )

    @property
    def _filling(self) -> _Filling:
        """What parameters are filled by; raises UnsupportedError once the experts are packed."""
        return self.refuse_loading() if self._filled_by is None else self._filled_by

    def _register(
        self,
        layer: nn.Module,
        parameter: str,
        data: Tensor,
        expected: int | None,
        *,
        quant_method: str,
        weight_loader: Callable[..., object],
    ) -> None:
        """Make `data` a parameter that `expected` tensors fill, by a loader of ours.

        None stands for tensors that files may lack.

        Args:
            layer: gets it.
            parameter: its name.
            data: zeros.
            expected: how many tensors fill it.
            quant_method: how scales lie, a value of vLLM's `FusedMoeWeightScaleSupported`.
            weight_loader: takes what vLLM's takes; it must not hold the layer.
        """
        made: Any = torch.nn.Parameter(data, requires_grad=False)
        # What vLLM notes of its own, such as that it takes the arguments of experts.
        vars(weight_loader).update(vars(self._filling.loader))
        made.quant_method, made.weight_loader = quant_method, weight_loader
        layer.register_parameter(parameter, made)
        self._expected[parameter] = expected
        self._loaded[parameter] = set()

    def _note(self, parameter: str, what: object) -> None:
        """Count a tensor as loaded."""
        self._loaded[parameter].add(what)
