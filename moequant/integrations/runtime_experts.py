"""The converted experts of a checkpoint on moequant's backends, one layer at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.integrations.expert_modules import (
    check_expert_blocks,
    converted_layers,
    expert_blocks,
    experts_of_layer,
)
from moequant.runtime.load import open_reader

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from moequant.integrations.expert_modules import ExpertsOfModel
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
        self._reader = open_reader(checkpoint, device, architecture)
        self._backend = backend
        self._activations: ActivationsChoice = activations
        self.layers = tuple(converted_layers(self._reader.converted))
        self.backends: set[str] = set()

    def check(self, model: PreTrainedModel) -> None:
        """Check that they can replace those of a model; raises UnsupportedError."""
        check_expert_blocks(model, expert_blocks(model), self._reader.converted)

    def load(self, layer: int) -> ExpertsOfModel:
        """The experts of one of `layers`; raises as `load_experts`."""
        experts = experts_of_layer(
            self._reader, layer, backend=self._backend, activations=self._activations
        )
        self.backends.add(experts.fused.chosen_backend())
        return experts
