"""The experts of a built transformers model, replaced by those of a converted checkpoint.

Configs are compared before anything is read. Otherwise experts of another size would only fail in
a kernel.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, cast

import torch

from moequant.errors import UnsupportedError
from moequant.integrations.expert_modules import (
    check_dtype,
    check_expert_blocks,
    converted_layers,
    expert_blocks,
    experts_of_layer,
    refuse_saving,
)
from moequant.integrations.transformers_library import import_transformers
from moequant.runtime.load import open_reader

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import PreTrainedModel

    from moequant.runtime.activations import ActivationsChoice
    from moequant.weights.converted import ConvertedCheckpoint

_COMPARED = {
    "layers": "layers",
    "sparse_layers": "layers with experts",
    "experts": "experts per layer",
    "hidden": "hidden size",
    "intermediate": "intermediate size",
    "act_fn": "activation function",
    "limited": "layers with another activation function",
}
"""Fields of MoeConfig that must agree between model and checkpoint, and their names in errors."""


def replace_experts(
    model: PreTrainedModel,
    checkpoint: str | Path,
    *,
    backend: str | None = None,
    activations: ActivationsChoice = "format",
    architecture: str | Path | None = None,
) -> None:
    """Replace the experts of a transformers model by those of a converted checkpoint.

    Works layer by layer: ours are loaded to the device of the experts they replace, which are then
    freed. The rest of the model does not change, and is not compared with the checkpoint. Experts
    of layers that the checkpoint keeps unconverted stay.

    Args:
        model: a model of the checkpoint's architecture.
        checkpoint: as for `load_model`.
        backend: as for `load_model`.
        activations: as for `load_model`.
        architecture: as for `load_model`.

    Raises:
        CheckpointError: as `load_experts`; earlier layers are already replaced then.
        UnsupportedError: the model has another architecture or other sizes than the checkpoint, no
            experts that can be replaced, or an unsupported dtype; or as `load_experts`.
    """
    import_transformers()
    reader = open_reader(checkpoint, torch.device("cpu"), architecture)
    converted = reader.converted
    _check_same_model(model, converted)
    check_dtype(model.dtype)
    blocks = expert_blocks(model)
    check_expert_blocks(model, blocks, converted)
    readers = {reader.device: reader}
    for layer in converted_layers(converted):
        old = cast("nn.Module", blocks[layer].experts)
        device = next(chain(old.parameters(), old.buffers())).device
        if device.type == "meta":
            raise UnsupportedError(
                f"layer {layer} of the model is on the meta device; load its weights first, or use "
                "load_model"
            )
        if device not in readers:
            readers[device] = open_reader(checkpoint, device, architecture)
        blocks[layer].experts = experts_of_layer(
            readers[device], layer, backend=backend, activations=activations
        )
    refuse_saving(model, converted.checkpoint.path)


def _check_same_model(model: PreTrainedModel, converted: ConvertedCheckpoint) -> None:
    """Check that the model has the architecture and the sizes of the checkpoint."""
    path, model_type = converted.checkpoint.path, model.config.model_type
    if converted.checkpoint.config["model_type"] != model_type:
        raise UnsupportedError(
            f"{path}: model_type {converted.checkpoint.config['model_type']!r}, but the model has "
            f"{model_type!r}; use a checkpoint converted from this model"
        )
    config = model.config.to_dict()
    found = converted.architecture.read_config(config)
    for field, label in _COMPARED.items():
        has, expected = getattr(found, field), getattr(converted.moe, field)
        if has != expected:
            raise UnsupportedError(
                f"{path}: {label} {_text(expected)}, but the model has {_text(has)}; use a "
                "checkpoint converted from this model"
            )


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
