"""transformers models that run on moequant's experts: `load_model` and `replace_experts`.

    transformers.py          a converted checkpoint loaded as a model
    expert_replacement.py    the experts of a model that is already built, replaced
    expert_modules.py        the experts of a model: where they are, and ours in their place
    other_weights.py         what a converted checkpoint holds besides experts
    transformers_library.py  the installed transformers, and what it makes of config.json

to generate:

    generation.py            a prompt continued, and timed
    generation_settings.py   generation_config.json, and what of it counts
    prompt_tokenizer.py      a prompt's token ids, and the text of ids
    tokenizer.py             the tokenizer and the vocabulary of a checkpoint
    static_cache.py          the cache that `generate` of such a model uses
    decoding.py              its decoding steps in CUDA graphs
    graph_inputs.py          what such a graph depends on

and for `moequant calibrate` and `evaluate`, which run a model a layer at a time:

    layerwise.py             a model of which one layer at a time is in memory
    module_weights.py        weights of its modules, given and taken away
    stored_tensors.py        the tensors of a source, as its unquantized release has them
    runtime_experts.py       converted experts on our backends, a layer at a time
    expert_inputs.py         what the experts of a layer multiply, whatever their class

Decisions, each with the failure it prevents:

* The model is built without the converted experts. Otherwise their BF16 weights, several times the
  size of the checkpoint, would briefly be in memory.
* Everything else is loaded by `from_pretrained` itself. Otherwise this module would have to know
  transformers' names, tied weights, buffers and dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from moequant.device import usable_device
from moequant.errors import CheckpointError
from moequant.integrations.decoding import use_static_cache
from moequant.integrations.expert_modules import (
    check_dtype,
    check_expert_blocks,
    converted_layers,
    expert_blocks,
    experts_of_layer,
    refuse_saving,
)
from moequant.integrations.expert_replacement import replace_experts
from moequant.integrations.generation_settings import read_generation_config
from moequant.integrations.other_weights import experts_prefix, other_tensors
from moequant.integrations.static_cache import why_not_static
from moequant.integrations.transformers_library import (
    building,
    import_transformers,
    model_class,
    no_progress_bar,
    read_config,
)
from moequant.progress import SilentProgress
from moequant.runtime.load import open_reader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from moequant.progress import Progress
    from moequant.runtime.activations import ActivationsChoice
    from moequant.weights.converted import ConvertedCheckpoint

__all__ = ["load_model", "replace_experts"]


def load_model(
    checkpoint: str | Path,
    *,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    activations: ActivationsChoice = "format",
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    architecture: str | Path | None = None,
    enforce_eager: bool = False,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Load a converted checkpoint as a transformers model, ready to generate.

    Its `generate` decodes with a static cache, on a CUDA device by replaying CUDA graphs, as
    `moequant.integrations.decoding.use_static_cache` describes; `decoding_of` there says whether.
    A model whose states no static cache holds decodes as in transformers; `why_not_static`
    in static_cache.py says why.

    Converted experts run quantized, on moequant's backends. Other converted weights, such as those
    of shared experts, are dequantized to `dtype` while loading, and what they multiply is never
    quantized, whatever config.json says of activations. Unconverted weights, including the
    experts of layers that a recipe keeps, are loaded as they are.

    Args:
        checkpoint: a converted checkpoint, or a folder that `moequant prepare` wrote in one.
        device: the device of the whole model.
        backend: name of the experts' backend; by default the best one for the device.
        activations: "format" quantizes the experts' activations as the format's GEMM does, and to
            NVFP4 or MXFP4 where config.json says so; "none" never does, "fp8_token" to FP8 with a
            scale per token; others as `FusedExperts`.
        dtype: dtype of the rest of the model; by default the one in config.json.
        attn_implementation: as for `from_pretrained`.
        architecture: as for `load_experts`.
        enforce_eager: decode as transformers does, without a static cache and CUDA graphs.
        progress: receives the progress, layer by layer.

    Returns:
        An instance of the class that AutoModelForCausalLM chooses, or AutoModelForImageTextToText
        for models that contain a language model, in eval mode. It cannot be trained, because the
        experts have no gradient, and no parameter requires one. It cannot be saved: copy the
        checkpoint instead.

    Raises:
        CheckpointError: an empty path; not a converted checkpoint, or a damaged one; a config.json
            or generation_config.json that transformers refuses; a missing tensor; or experts in
            layers that config.json does not have.
        UnsupportedError: transformers, or a package for attention, is not installed, or does not
            support the model; a dtype that is no torch.dtype, or one that the experts do not
            support; or as `load_experts`.
    """
    transformers = import_transformers()
    place = usable_device(device)
    reader = open_reader(checkpoint, place, architecture)
    config = read_config(transformers, reader.converted.checkpoint.path)
    settings = read_generation_config(reader.converted.checkpoint.path)
    class_ = model_class(transformers, config)
    dtype = check_dtype(config.dtype if dtype is None else dtype)
    layers = converted_layers(reader.converted)
    _check_layers(reader.converted)
    report = progress or SilentProgress()
    sizes = {layer: _bytes_of_experts(reader.converted, layer) for layer in layers}
    total = sum(info.size_bytes for info in reader.converted.checkpoint.tensors.values())
    report.start("loading", total)
    # Experts first, because they may be refused.
    experts = {}
    for layer in layers:
        experts[layer] = experts_of_layer(reader, layer, backend=backend, activations=activations)
        report.advance(sizes[layer], reader.converted.moe.whereabouts(layer))
    model = _build(
        _without_experts(class_, reader.converted, layers),
        config,
        other_tensors(reader, layers, dtype),
        dtype=dtype,
        device_map=None if place.type == "cpu" else {"": place},
        attn_implementation=attn_implementation,
    )
    report.advance(total - sum(sizes.values()), "other weights")
    report.finish()
    model.__class__ = class_
    for layer, block in expert_blocks(model).items():
        if layer in experts:
            block.experts = experts[layer]
    model.requires_grad_(requires_grad=False)
    if settings is not None:
        model.generation_config = settings
    _finish(model, reader.converted.checkpoint.path)
    if not enforce_eager and why_not_static(model) is None:
        use_static_cache(model)
    return model


def _bytes_of_experts(converted: ConvertedCheckpoint, layer: int) -> int:
    prefix = experts_prefix(converted, layer)
    tensors = converted.checkpoint.tensors
    return sum(info.size_bytes for name, info in tensors.items() if name.startswith(prefix))


def _check_layers(converted: ConvertedCheckpoint) -> None:
    """Check that config.json has all layers whose experts the files hold.

    transformers would leave the others out, and say so in a log.

    Raises:
        CheckpointError: it lacks one.
    """
    moe, path = converted.moe, converted.checkpoint.path
    held = {name.partition(".experts.")[0] for name in converted.checkpoint.tensors}
    for layer in range(moe.layers, moe.layers + len(held)):
        block = converted.expert_module(layer, 0, "down").partition(".experts.")[0]
        if block in held and layer not in moe.optional_layers:
            raise CheckpointError(
                f"{path}: {block}.experts: config.json has {moe.layers} layers, without this one; "
                "correct config.json, or fetch or convert the checkpoint again"
            )


def _without_experts(
    model_class: type[PreTrainedModel], converted: ConvertedCheckpoint, layers: Sequence[int]
) -> type[PreTrainedModel]:
    """A subclass whose instances have, in `layers`, a module without weights as experts."""

    class WithoutExperts(model_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            blocks = expert_blocks(self)
            check_expert_blocks(self, blocks, converted)
            for layer in layers:
                blocks[layer].experts = nn.Identity()

    # transformers chooses the conversion of tensor names by the name and module of the class.
    WithoutExperts.__name__ = model_class.__name__
    WithoutExperts.__module__ = model_class.__module__
    return WithoutExperts


def _build(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    tensors: Mapping[str, Tensor],
    **options: Any,
) -> PreTrainedModel:
    """Build the model from `tensors`, which have their names on disk.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape, or the model cannot be made.
    """
    given = {name: value for name, value in options.items() if value is not None}
    # All tensors are already in memory. Those of other shapes are said in our words.
    with no_progress_bar(), building(model_class.__name__):
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **given,
        )
    for fault in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report[fault]:
            raise CheckpointError(
                f"{model_class.__name__}: {fault.replace('_', ' ')}: "
                f"{', '.join(sorted(map(str, report[fault])))}; config.json does not match the "
                "weights, fetch or convert the checkpoint again"
            )
    return model


def _finish(model: PreTrainedModel, folder: Path) -> None:
    """Set what `from_pretrained` sets if called with a folder."""
    model.config.name_or_path = model.name_or_path = str(folder)
    refuse_saving(model, folder)
