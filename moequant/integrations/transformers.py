"""transformers models that run on moequant's experts.

transformers calls the experts of a layer as `experts(hidden_states, ids, weights)`, of [M, H] or
[B, S, H], and twice [M, T]. `ExpertsOfModel` takes these and replaces that module. No class of
transformers is changed, and nothing is registered there.

Decisions, each with the failure it prevents:

* The model is built without the converted experts. Otherwise their BF16 weights, several times the
  size of the checkpoint, would briefly be in memory.
* Everything else is loaded by `from_pretrained` itself. Otherwise this module would have to know
  transformers' names, tied weights, buffers and dtypes.
* Configs are compared before anything is read. Otherwise experts of another size would only fail
  in a kernel.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from reprlib import repr as show
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from moequant.device import usable_device
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import STATIC_SCHEMES, dequantize
from moequant.integrations.decoding import use_static_cache, why_not_static
from moequant.integrations.generation_settings import read_generation_config
from moequant.integrations.library import building, import_transformers
from moequant.progress import SilentProgress
from moequant.runtime import FusedExperts
from moequant.runtime.inputs import HIDDEN_DTYPES
from moequant.runtime.load import open_reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from moequant.progress import Progress
    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.layer_reader import LayerReader
    from moequant.weights.converted import ConvertedCheckpoint

CANNOT_RUN = {
    ("5.24.0", "Llama4ForConditionalGeneration"): (
        "its forward reads `image_outputs` of what its language model returns, which has none"
    ),
}
"""Classes of releases of transformers that stop in every forward, and why."""
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
    A model whose states no static cache holds decodes as in transformers: `why_not_static`.

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
        CheckpointError: not a converted checkpoint, or a damaged one; a config.json or
            generation_config.json that transformers refuses; a missing tensor; or experts in layers
            that config.json does not have.
        UnsupportedError: transformers, or a package for attention, is not installed, or does not
            support the model; a dtype that the experts do not support; or as `load_experts`.
    """
    transformers = import_transformers()
    place = usable_device(device)
    reader = open_reader(checkpoint, place, architecture)
    config = read_config(transformers, reader.converted.checkpoint.path)
    settings = read_generation_config(reader.converted.checkpoint.path)
    class_ = model_class(transformers, config)
    dtype = _check_dtype(config.dtype if dtype is None else dtype)
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
        _other_tensors(reader, layers, dtype),
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
    _check_dtype(model.dtype)
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
    _refuse_saving(model, converted.checkpoint.path)


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


def read_config(transformers: ModuleType, folder: Path) -> PretrainedConfig:
    """config.json as read by transformers, without quantization_config, which moequant reads.

    Raises:
        CheckpointError: transformers refuses it, or what it says of the language model is no
            object.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # The errors of its field checks have no common base class.
    except Exception as error:
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot read it: "
            f"{error}; compare it with that of the model's release"
        ) from error
    language = config.get_text_config(decoder=True)
    if not isinstance(language, transformers.PretrainedConfig):
        raise CheckpointError(
            f"{folder / 'config.json'}: its text_config, decoder or generator is {show(language)}, "
            "but must be an object; correct config.json"
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Else forward passes return tuples, which `generate` cannot read.
    config.return_dict = language.return_dict = True
    return config


def model_class(transformers: ModuleType, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a language model, or of a larger model that contains one.

    Raises:
        UnsupportedError: transformers has neither for this config.
    """
    for classes in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        found = classes.get(type(config), None)
        if found is not None and isinstance(config, found.config_class):
            return cast("type[PreTrainedModel]", found)
    raise UnsupportedError(
        f"config.json: transformers {transformers.__version__} has neither a causal language model "
        f"nor an image-text-to-text model for model_type {config.model_type!r}"
    )


def check_runs(version: str, name: str) -> None:
    """Check that a class of a release of transformers can run as a whole.

    Raises:
        UnsupportedError: it cannot; says why.
    """
    if why := CANNOT_RUN.get((version, name)):
        raise UnsupportedError(
            f"transformers {version} cannot run {name}: {why}; install another release: "
            f"pip install 'transformers!={version}'"
        )


def _check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in HIDDEN_DTYPES:
        raise UnsupportedError(
            f"the model computes in {dtype!r}, but the experts support only "
            f"{', '.join(map(repr, HIDDEN_DTYPES))}; choose another dtype"
        )
    return dtype


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


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """No bars of transformers for as long as the context lasts."""
    logging = import_transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _other_tensors(
    reader: LayerReader, layers: Sequence[int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors but the experts of `layers`, on the device, under their names on disk."""
    converted = reader.converted
    experts = tuple(_experts_prefix(converted, layer) for layer in layers)
    # transformers' models have no modules for multi-token prediction.
    mtp = tuple(_experts_prefix(converted, layer) for layer in converted.moe.optional_layers)
    has_role_pattern = converted.architecture.has_role_pattern
    names = [
        name
        for name in converted.checkpoint.tensors
        if not name.startswith(experts + mtp) or has_role_pattern(name)
    ]
    formats = {module: _format_of(converted, module) for module in map(_module_of, names)}
    modules = [module for module, format in formats.items() if format is not None]
    parts = {n for m in modules for n in converted.tensor_names(m, cast("str", formats[m]))}
    parts |= {
        name
        for m in modules
        if converted.activations_of(m) in STATIC_SCHEMES
        for name in converted.dialect.input_scale_specs(m, cast("str", formats[m]))
    }
    tensors = dict(reader.read_tensors([name for name in names if name not in parts]))
    for module, q in reader.read_modules(modules):
        tensors[f"{module}.weight"] = dequantize(q).to(dtype)
    return tensors


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _experts_prefix(converted: ConvertedCheckpoint, layer: int) -> str:
    """The common prefix of the names of a layer's expert tensors, which no other tensor has."""
    head, found, _ = converted.expert_module(layer, 0, "down").partition(".experts.")
    assert found, "every pattern in the architecture table contains .experts."
    return head + found


def _finish(model: PreTrainedModel, folder: Path) -> None:
    """Set what `from_pretrained` sets if called with a folder."""
    model.config.name_or_path = model.name_or_path = str(folder)
    _refuse_saving(model, folder)


def _bytes_of_experts(converted: ConvertedCheckpoint, layer: int) -> int:
    prefix = _experts_prefix(converted, layer)
    tensors = converted.checkpoint.tensors
    return sum(info.size_bytes for name, info in tensors.items() if name.startswith(prefix))


def _format_of(converted: ConvertedCheckpoint, module: str) -> str | None:
    """The format of a module with quantized weights on disk; None for other modules.

    The tensors on disk decide, because config.json alone would also give norms a format.
    """
    format = converted.format_of(module)
    if format is None or len(converted.tensor_names(module, format)) < 2:
        return None
    return format


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
            f"{_text(tuple(blocks)) or 'none'}, but the checkpoint has them in {_text(expected)}; "
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


def _is_stacked(experts: nn.Module) -> bool:
    """Whether a module has the stacked weights of all experts."""
    down = getattr(experts, "down_proj", None)
    if down is None:
        down = getattr(getattr(experts, "mlp", None), "w2", None)
    return isinstance(down, nn.Parameter)


def _refuse_saving(model: PreTrainedModel, folder: Path) -> None:
    """Make `save_pretrained` an error: nothing could load what it would write."""

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            f"a model on moequant's experts cannot be saved; copy the checkpoint: {folder}"
        )

    model.save_pretrained = save_pretrained
