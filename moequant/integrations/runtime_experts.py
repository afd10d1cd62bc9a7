"""The converted experts of a checkpoint on moequant's backends, one layer at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.integrations.transformers import (
    ExpertsOfModel,
    check_expert_blocks,
    converted_layers,
    expert_blocks,
)
from moequant.runtime import FusedExperts
from moequant.runtime.load import open_reader

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from moequant.runtime.activations import ActivationsChoice


class RuntimeExperts:
    """Loads the experts of one layer after the other, as a model of transformers calls them.

    Args:
        checkpoint: a converted checkpoint.
        device: where experts shall be.
        backend: as for `load_experts`.
        activations: as for `load_experts`.
        architecture: as for `load_experts`.

    Attributes:
        layers: those with converted experts.
        backends: names of the backends that run those loaded so far.

    Raises:
        CheckpointError: not a converted checkpoint, or a damaged one.
        UnsupportedError: no layer's experts are converted, or an unknown quantization.
    """

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device,
        *,
        backend: str | None = None,
        activations: ActivationsChoice = "format",
        architecture: str | Path | None = None,
    ) -> None:
        self._reader = open_reader(checkpoint, device, architecture, quantized_activations=True)
        self._backend = backend
        self._activations: ActivationsChoice = activations
        self.layers = tuple(converted_layers(self._reader.converted))
        self.backends: set[str] = set()

    def check(self, model: PreTrainedModel) -> None:
        """Check that they can replace those of a model; raises UnsupportedError."""
        check_expert_blocks(model, expert_blocks(model), self._reader.converted)

    def load(self, layer: int) -> ExpertsOfModel:
        """The experts of one of `layers`; raises as `load_experts`."""
        experts = range(self._reader.converted.moe.experts)
        activations = self._reader.choose_activations(layer, self._activations)
        packed = self._reader.load(layer, experts, backend=self._backend, activations=activations)
        fused = FusedExperts(packed, backend=self._backend, activations=activations)
        self.backends.add(fused.chosen_backend())
        return ExpertsOfModel(fused)
