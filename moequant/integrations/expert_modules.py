"""The experts of a transformers model: where they are, and moequant's in their place.

transformers calls the experts of a layer as `experts(hidden_states, ids, weights)`, of [M, H] or
[B, S, H], and twice [M, T]. `ExpertsOfModel` takes these and replaces that module. No class of
transformers is changed, and nothing is registered there.
"""

from __future__ import annotations

from reprlib import repr as show
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from moequant.errors import UnsupportedError
from moequant.runtime import FusedExperts
from moequant.runtime.inputs import HIDDEN_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.layer_reader import LayerReader
    from moequant.weights.converted import ConvertedCheckpoint


class ExpertsOfModel(nn.Module):
    """Experts as a model of transformers calls them.

    Args:
        fused: the experts.
    """

    def __init__(self, fused: FusedExperts) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The output, shaped as the hidden states, [M, H] or [B, S, H]; ids and weights [M, T]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: Tensor = self.fused(rows, weights, ids)
        return output.view(hidden_states.shape)


def experts_of_layer(
    reader: LayerReader,
    layer: int,
    *,
    backend: str | None,
    activations: ActivationsChoice,
) -> ExpertsOfModel:
    """The experts of a layer that holds converted ones; arguments and errors as `load_model`."""
    everything = range(reader.converted.moe.experts)
    activations = reader.choose_activations(layer, activations)
    packed = reader.load(layer, everything, backend=backend, activations=activations)
    return ExpertsOfModel(FusedExperts(packed, backend=backend, activations=activations))


def converted_layers(converted: ConvertedCheckpoint) -> list[int]:
    """The layers whose experts are converted, without multi-token prediction.

    Raises:
        UnsupportedError: there is none.
        CheckpointError: there is none by config.json, but the files hold quantized experts.
    """
    moe = converted.moe
    layers = [
        layer for layer in moe.sparse_layers if converted.format_of_experts(layer) is not None
    ]
    if not layers:
        raise converted.no_converted_experts("load it with transformers directly")
    return layers


def decoder_module(model: PreTrainedModel) -> Any:
    """The module that holds the layers; Llama 4 calls its language model the decoder."""
    decoder: Any = model.get_decoder()
    has_layers = hasattr(decoder, "layers") or hasattr(decoder, "blocks")
    return decoder if has_layers else getattr(decoder, "model", decoder)


def expert_blocks(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The module of each layer, by index, whose attribute `experts` is a module."""
    blocks = {}
    decoder = decoder_module(model)
    for index, layer in enumerate(getattr(decoder, "layers", getattr(decoder, "blocks", ()))):
        for block in layer.modules():
            if isinstance(getattr(block, "experts", None), nn.Module):
                blocks[index] = block
    return blocks


def check_expert_blocks(
    model: PreTrainedModel, blocks: Mapping[int, nn.Module], converted: ConvertedCheckpoint
) -> None:
    """Check that the model's experts can be replaced by `FusedExperts`.

    Args:
        model: which.
        blocks: what `expert_blocks` returns for it.
        converted: where the experts are from.

    Raises:
        UnsupportedError: they cannot; says why.
    """
    if (routing := converted.architecture.routing) is not None:
        raise UnsupportedError(
            f"{type(model).__name__}: its router {routing}, which FusedExperts does not support; "
            "load this checkpoint with transformers or an engine, or call `load_experts` yourself"
        )
    expected = converted.moe.sparse_layers
    if tuple(blocks) != expected:
        raise UnsupportedError(
            f"{type(model).__name__}: a module `experts` in layers "
            f"{_listed(blocks) or 'none'}, but the checkpoint has them in {_listed(expected)}; "
            "build the model with transformers 5"
        )
    for layer, block in blocks.items():
        experts = cast("nn.Module", block.experts)
        if not isinstance(experts, ExpertsOfModel) and not _is_stacked(experts):
            raise UnsupportedError(
                f"{type(model).__name__}: the experts of layer {layer} are a "
                f"{type(experts).__name__}, but must be one module with the stacked weights of all "
                "experts; build the model with transformers 5"
            )


def _listed(layers: Iterable[int]) -> str:
    return ", ".join(map(str, layers))


def _is_stacked(experts: nn.Module) -> bool:
    """Whether a module has the stacked weights of all experts."""
    down = getattr(experts, "down_proj", None)
    if down is None:
        down = getattr(getattr(experts, "mlp", None), "w2", None)
    return isinstance(down, nn.Parameter)


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a model computes in; torch's default for None.

    Raises:
        UnsupportedError: the experts do not support it, or it is none.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"dtype is {show(dtype)}, but must be a torch.dtype, such as torch.bfloat16"
        )
    if dtype not in HIDDEN_DTYPES:
        raise UnsupportedError(
            f"the model computes in {dtype!r}, but the experts support only "
            f"{', '.join(map(repr, HIDDEN_DTYPES))}; choose another dtype"
        )
    return dtype


def refuse_saving(model: PreTrainedModel, folder: Path) -> None:
    """Make `save_pretrained` an error: nothing could load what it would write."""

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            f"a model on moequant's experts cannot be saved; copy the checkpoint: {folder}"
        )

    model.save_pretrained = save_pretrained
