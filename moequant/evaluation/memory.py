"""An upper bound of the memory of an evaluation, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.evaluation.predictions import CHUNK_BYTES, CHUNK_COPIES
from moequant.streaming.memory import batch_bytes, embedding_bytes, kernel_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moequant.integrations.layerwise import LayerwiseModel

_LOGITS_COPIES = 6
"""Logits of a window in float32 that exist at once: of the reference, and of the test as the head
returns them, scaled, capped and converted."""


@dataclass(frozen=True, kw_only=True)
class EvaluationMemory:
    """Upper bounds in bytes, in addition to the interpreter and libraries.

    Attributes:
        rest: weights outside of layers, embedding and head, of all models.
        embedding: while an embedding is loaded.
        layer: weights of the largest layer, with what loading it takes.
        batch: what a batch takes while it runs through a layer.
        heads: of a reference and a test, with what loading them takes.
        logits: of a window, while it is compared.
        kernels: that a library compiles and keeps.
    """

    rest: int
    embedding: int
    layer: int
    batch: int
    heads: int
    logits: int
    kernels: int

    @property
    def peak_bytes(self) -> int:
        """The peak."""
        running = self.layer + self.batch
        return self.rest + max(self.embedding, running, self.heads + self.logits) + self.kernels


def memory_of(models: Sequence[LayerwiseModel], batches: Sequence[Tensor]) -> EvaluationMemory:
    """The memory of running models over batches [B, S], one after the other."""
    tokens = batches[0].shape[1]
    vocabulary = max(model.vocabulary for model in models)
    every = [(model, range(len(model.layers))) for model in models]
    return EvaluationMemory(
        rest=sum(model.rest_bytes for model in models),
        embedding=max(embedding_bytes(model, batches) for model in models),
        layer=max(model.loading_bytes(index) for model, layers in every for index in layers),
        batch=max(batch_bytes(model, batches, layers) for model, layers in every),
        # Both stay; one more is read.
        heads=3 * max(model.head_bytes for model in models),
        logits=_LOGITS_COPIES * tokens * vocabulary * 4 + CHUNK_COPIES * CHUNK_BYTES,
        kernels=max(kernel_bytes(model) for model in models),
    )
