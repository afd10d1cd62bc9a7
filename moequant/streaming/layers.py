"""Run batches through one part of a model after the other, from file to file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.streaming.activations import ActivationsWriter, read_activations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch import Tensor

    from moequant.integrations.layerwise import Activations, LayerwiseModel


DEFAULT_BATCH_TOKENS = 2048
"""Tokens that run through a layer at once, in whole windows."""


def embed_batches(model: LayerwiseModel, batches: Sequence[Tensor], returned: Path) -> None:
    """Write the embedding of token ids [B, S] of each batch."""
    with model.embedding(), ActivationsWriter(returned) as written:
        for ids in batches:
            written.write(model.embed(ids))
        written.finish()


def run_layer(
    model: LayerwiseModel,
    index: int,
    batches: Sequence[Tensor],
    *,
    embedded: Path,
    before: Path | None,
    returned: Path,
    after_batch: Callable[[Tensor], None],
) -> None:
    """Write what a layer returns for each batch, within `model.layer(index)`.

    Args:
        model: the model.
        index: of the layer.
        batches: token ids [B, S].
        embedded: what `embed_batches` wrote.
        before: what the layer before returned; None for the first layer.
        returned: the file to write.
        after_batch: called with the ids of each batch that has run.

    Raises:
        MoequantError: a file cannot be written.
        UnsupportedError: as `LayerwiseModel.run`.
    """
    earlier: Iterable[Activations | None] = [None] * len(batches)
    if before is not None:
        earlier = read_activations(before)
    with ActivationsWriter(returned) as written:
        for ids, vectors, previous in zip(
            batches, read_activations(embedded), earlier, strict=True
        ):
            assert isinstance(vectors, torch.Tensor)
            written.write(model.run(index, ids, vectors, previous))
            after_batch(ids)
        written.finish()
