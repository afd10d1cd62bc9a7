"""A model of an evaluation, run layer by layer to what its last layer returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.errors import NonFiniteError
from moequant.integrations.layerwise import LayerwiseModel
from moequant.streaming.activations import remove_activations
from moequant.streaming.layers import embed_batches, run_layer
from moequant.streaming.source import open_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from moequant.integrations.layerwise import Activations
    from moequant.integrations.runtime_experts import RuntimeExperts
    from moequant.progress import Progress
    from moequant.storage.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A checkpoint, and how it is run.

    Attributes:
        name: what it is called in the result.
        checkpoint: which.
        model: its decoder.
        experts: on moequant's backends; None where transformers' own run dequantized weights.
    """

    name: str
    checkpoint: Checkpoint
    model: LayerwiseModel
    experts: RuntimeExperts | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        experts: RuntimeExperts | None = None,
        architecture: str | Path | None = None,
    ) -> EvaluatedModel:
        """Read headers and config.json.

        Raises as `LayerwiseModel`, its `check_logits` and `open_source`.
        """
        checkpoint, source = open_source(path, architecture)
        model = LayerwiseModel(checkpoint, source, dtype=dtype, device=device, experts=experts)
        model.check_logits()
        return cls(name=name, checkpoint=checkpoint, model=model, experts=experts)

    def run(self, batches: Sequence[Tensor], folder: Path, progress: Progress) -> Path:
        """Run token ids [B, S] through all layers; returns where the last one's results are.

        Args:
            batches: token ids.
            folder: an empty one, for activations; those of the last layer stay.
            progress: receives the tokens of each batch and layer.
        """
        layers = len(self.model.layers)
        progress.start(
            f"running {self.name}", layers * sum(ids.numel() for ids in batches), unit="tokens"
        )
        self.model.load_rest()
        embedded, before = folder / "embedding.bin", None
        embed_batches(self.model, batches, embedded)
        for index in range(layers):
            returned = folder / f"layer-{index}.bin"

            def advance(ids: Tensor, index: int = index) -> None:
                progress.advance(ids.numel(), f"layer {index + 1}/{layers}")

            with self.model.layer(index):
                run_layer(
                    self.model,
                    index,
                    batches,
                    embedded=embedded,
                    before=before,
                    returned=returned,
                    after_batch=advance,
                )
            if before is not None:
                remove_activations(before)
            before = returned
        remove_activations(embedded)
        progress.finish()
        assert before is not None, "a model has layers"
        return before

    def logits(self, ids: Tensor, returned: Activations) -> Iterator[Tensor]:
        """The logits [S, V] of each window of a batch [B, S], within `model.head`.

        Args:
            ids: token ids.
            returned: what the last layer returned for them.

        Raises:
            NonFiniteError: one is NaN or Inf.
        """
        for window in range(len(ids)):
            found = self.model.logits(
                ids[window : window + 1], _window_of(returned, window, len(ids))
            )[0]
            if not torch.isfinite(found).all():
                raise NonFiniteError(
                    f"{self.name}: a logit is NaN or Inf; check the weights with `moequant "
                    "verify`, or compute in another --dtype"
                )
            yield found


def _window_of(returned: Activations, window: int, windows: int) -> Activations:
    """Of what a layer returned for several windows what belongs to one."""
    if isinstance(returned, torch.Tensor):
        return returned[window : window + 1]
    return tuple(
        part[window : window + 1]
        if part is not None and part.ndim and len(part) == windows
        else part
        for part in returned
    )
