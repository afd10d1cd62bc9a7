"""Models of transformers that run on our experts.

transformers calls the experts of a layer as `experts(hidden_states, ids, weights)`, of [M, H] and
twice [M, T]. `FusedExperts` takes the same, and stands in that module's place as it is: no class of
transformers is changed, and nothing is registered there.

Decision / failure it prevents:

* the model is built without the experts that were converted / their BF16, several times the size
  of the model, in memory for a moment;
* all else goes in through `from_pretrained` itself / names, tied weights, buffers and dtypes as
  somebody here believes them to be;
* configs are compared before anything is read / a model with experts of another size, found in a
  kernel.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from moequant.act_fn import ActFn
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import dequantize
from moequant.progress import SilentProgress
from moequant.runtime import FusedExperts
from moequant.runtime.inputs import HIDDEN_DTYPES
from moequant.runtime.load import open_reader, usable_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from moequant.progress import Progress
    from moequant.runtime.layer_reader import LayerReader
    from moequant.weights.converted import ConvertedCheckpoint

_GENERATION_CONFIG = "generation_config.json"
_SAME = {
    "layers": "layers",
    "sparse_layers": "experts in layers",
    "experts": "experts a layer",
    "hidden": "hidden size",
    "intermediate": "intermediate size",
    "act_fn": "activation function",
    "limited": "layers whose activation function is another",
}
"""Fields of MoeConfig that a model and a checkpoint share, as errors call them."""
_GIVEN_SEQUENCES = ("DbrxExperts",)
"""Modules of transformers that hold experts and are called with [B, S, H], not [M, H]."""


def load_model(
    checkpoint: str | Path,
    *,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    activations: Literal["format", "none"] = "format",
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    architecture: str | Path | None = None,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Load a converted checkpoint as a model of transformers, ready to generate.

    Experts that were converted run as they are, on our backends. Other converted weights, such as
    those of shared experts, are decoded once, into `dtype`; all that was kept is as it was, experts
    of layers that a recipe kept included.

    Args:
        checkpoint: a converted checkpoint, or a folder that `moequant prepare` wrote in one.
        device: where to put the model, all of it.
        backend: name of a backend of the experts; by default the best that can run them there.
        activations: "format" quantizes the experts' activations as the format's GEMM does, "none"
            never does.
        dtype: what the rest of the model computes in; by default what config.json says.
        attn_implementation: as `from_pretrained` has it.
        architecture: as `load_experts` takes it.
        progress: told of every layer.

    Returns:
        An instance of the class that AutoModelForCausalLM chooses, or AutoModelForImageTextToText
        where the language model is a part of that, in eval mode. It cannot be trained, for experts
        record nothing for autograd, nor saved: the checkpoint it came from is what to copy.

    Raises:
        CheckpointError: not a converted checkpoint, or a damaged one; a config.json that
            transformers refuses; or a tensor of the model that is not there.
        UnsupportedError: transformers is not installed, or has no such model; a dtype that experts
            do not take; or as `load_experts`.
    """
    transformers = import_transformers()
    place = usable_device(device)
    reader = open_reader(checkpoint, place, architecture)
    config = _read_config(transformers, reader.converted)
    model_class = _model_class(transformers, config)
    dtype = _check_dtype(config.dtype if dtype is None else dtype)
    layers = _converted_layers(reader.converted)
    report = progress or SilentProgress()
    sizes = {layer: _bytes_of_experts(reader.converted, layer) for layer in layers}
    total = sum(info.size_bytes for info in reader.converted.checkpoint.tensors.values())
    report.start("loading", total)
    # First, for what they refuse is known before the rest is read.
    experts = {}
    for layer in layers:
        experts[layer] = _load(reader, layer, backend=backend, activations=activations)
        report.advance(sizes[layer], f"layer {layer}")
    model = _build(
        _without_experts(model_class, reader.converted, layers),
        config,
        _other_tensors(reader, layers, dtype),
        dtype=dtype,
        device_map=None if place.type == "cpu" else {"": place},
        attn_implementation=attn_implementation,
    )
    report.advance(total - sum(sizes.values()), "all else")
    report.finish()
    model.__class__ = model_class
    for layer, holder in _experts_by_layer(model).items():
        if layer in experts:
            holder.put(experts[layer])
    _finish(model, reader.converted.checkpoint.path)
    return model


def replace_experts(
    model: PreTrainedModel,
    checkpoint: str | Path,
    *,
    backend: str | None = None,
    activations: Literal["format", "none"] = "format",
    architecture: str | Path | None = None,
) -> None:
    """Replace the experts of a model of transformers by those of a converted checkpoint.

    Layer by layer: the experts there are let go of once ours are loaded, to the same device. The
    rest of the model stays as it is; whether it came of the same weights is not looked at. Experts
    of layers that the checkpoint keeps unconverted stay, too.

    Args:
        model: built already, of the architecture of the checkpoint.
        checkpoint: as for `load_model`.
        backend: as for `load_model`.
        activations: as for `load_model`.
        architecture: as for `load_model`.

    Raises:
        CheckpointError: as `load_experts`; the layers in front are replaced then.
        UnsupportedError: the model is of another architecture or size than the checkpoint, has no
            experts that we can replace, or a dtype that ours do not take; or as `load_experts`.
    """
    import_transformers()
    reader = open_reader(checkpoint, torch.device("cpu"), architecture)
    converted = reader.converted
    _check_same_model(model, converted)
    _check_dtype(model.dtype)
    holders = _experts_by_layer(model)
    _check_holders(model, holders, converted)
    readers = {reader.device: reader}
    for layer in _converted_layers(converted):
        device = holders[layer].device
        if device.type == "meta":
            raise UnsupportedError(
                f"layer {layer} of the model is on no device; load its weights first, or use "
                "load_model"
            )
        if device not in readers:
            readers[device] = open_reader(checkpoint, device, architecture)
        holders[layer].put(_load(readers[device], layer, backend=backend, activations=activations))
    _refuse_saving(model, converted.checkpoint.path)


def import_transformers() -> ModuleType:
    """The library.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"transformers cannot be imported ({error}); install it: "
            "pip install 'moequant[transformers]'"
        ) from error
    library: ModuleType = transformers
    return library


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Holder:
    """Where a layer's experts stand: an attribute of a module."""

    block: nn.Module
    name: str

    @property
    def experts(self) -> nn.Module:
        experts = getattr(self.block, self.name)
        assert isinstance(experts, nn.Module), type(experts)
        return experts

    @property
    def device(self) -> torch.device:
        return next(iter(_tensors_of(self.experts))).device

    def put(self, experts: nn.Module) -> None:
        replaced = self.experts
        if isinstance(replaced, _OfSequences) or type(replaced).__name__ in _GIVEN_SEQUENCES:
            experts = _OfSequences(experts)
        setattr(self.block, self.name, experts)


class _OfSequences(nn.Module):
    """Experts of a block that calls them with [B, S, H], and not with [M, H].

    Args:
        experts: who take [M, H].
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.of_rows = experts

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[B, S, H] of hidden states [B, S, H], and ids and weights of [B * S, T]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: Tensor = self.of_rows(rows, ids, weights)
        return output.view(hidden_states.shape)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _experts_by_layer(model: PreTrainedModel) -> dict[int, _Holder]:
    """The layers whose experts are one module called `experts`, by index."""
    holders = {}
    decoder = model.get_decoder()
    for index, layer in enumerate(getattr(decoder, "layers", getattr(decoder, "blocks", ()))):
        for block in layer.modules():
            if isinstance(getattr(block, "experts", None), nn.Module):
                holders[index] = _Holder(block=block, name="experts")
    return holders


def _load(
    reader: LayerReader, layer: int, *, backend: str | None, activations: Literal["format", "none"]
) -> FusedExperts:
    everything = range(reader.converted.moe.experts)
    return FusedExperts(reader.read(layer, everything), backend=backend, activations=activations)


def _converted_layers(converted: ConvertedCheckpoint) -> list[int]:
    """The layers of the model proper whose experts are not as they were."""
    moe = converted.moe
    layers = [
        layer
        for layer in moe.sparse_layers
        if converted.format_of(converted.expert_module(layer, 0, "down")) is not None
    ]
    if not layers:
        raise UnsupportedError(
            f"{converted.checkpoint.path}: config.json leaves the experts of all layers as they "
            "were; transformers loads it without us"
        )
    return layers


def _read_config(transformers: ModuleType, converted: ConvertedCheckpoint) -> PretrainedConfig:
    """config.json as transformers reads it, without the quantization that we read ourselves."""
    folder = converted.checkpoint.path
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Its checks of fields raise what has no common base.
    except Exception as error:
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot read it: "
            f"{error}"
        ) from error
    del config.quantization_config
    return config


def _model_class(transformers: ModuleType, config: PretrainedConfig) -> type[PreTrainedModel]:
    """A language model, or what has one inside; not the language model of a config that has more.

    Raises:
        UnsupportedError: transformers has neither.
    """
    for classes in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        model_class = classes.get(type(config), None)
        if model_class is not None and isinstance(config, model_class.config_class):
            return cast("type[PreTrainedModel]", model_class)
    raise UnsupportedError(
        f"config.json: transformers {transformers.__version__} has no causal language model of "
        f"model_type {config.model_type!r}, and none for text with pictures"
    )


def _check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in HIDDEN_DTYPES:
        raise UnsupportedError(
            f"the model computes in {dtype!r}, but experts take one of: "
            f"{', '.join(map(repr, HIDDEN_DTYPES))}; choose another dtype"
        )
    return dtype


def _without_experts(
    model_class: type[PreTrainedModel], converted: ConvertedCheckpoint, layers: Sequence[int]
) -> type[PreTrainedModel]:
    """A class whose instances have, in `layers`, a module without weights for experts."""

    class WithoutExperts(model_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            holders = _experts_by_layer(self)
            _check_holders(self, holders, converted)
            for layer in layers:
                holders[layer].put(nn.Identity())

    # transformers chooses conversions of names by that of the class, and has none for classes that
    # are not its own.
    WithoutExperts.__name__ = model_class.__name__
    WithoutExperts.__module__ = model_class.__module__
    return WithoutExperts


def _build(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    tensors: Mapping[str, Tensor],
    **options: Any,
) -> PreTrainedModel:
    """The model with `tensors`, named as on disk.

    Raises:
        CheckpointError: one that it wants is not among them, or has another shape.
    """
    given = {name: value for name, value in options.items() if value is not None}
    with _no_progress_bar():  # everything has been read
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True, **given
        )
    for fault in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report[fault]:
            raise CheckpointError(
                f"{model_class.__name__}: {fault.replace('_', ' ')}: "
                f"{', '.join(sorted(map(str, report[fault])))}; config.json and the weights do not "
                "belong together, fetch or convert the checkpoint again"
            )
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
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
    """All that a model without the experts of `layers` wants, on the device, named as on disk."""
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
    tensors = dict(reader.read_tensors([name for name in names if name not in parts]))
    for module, q in reader.read_modules(modules):
        tensors[f"{module}.weight"] = dequantize(q).to(dtype)
    return tensors


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _experts_prefix(converted: ConvertedCheckpoint, layer: int) -> str:
    """What the names of all tensors of a layer's experts begin with, as of no others."""
    head, found, _ = converted.expert_module(layer, 0, "down").partition(".experts.")
    assert found, "the architecture table calls them so"
    return head + found


def _finish(model: PreTrainedModel, folder: Path) -> None:
    """What from_pretrained does with a folder, and was not given one here."""
    model.config.name_or_path = model.name_or_path = str(folder)
    if (folder / _GENERATION_CONFIG).is_file():
        generation_config = import_transformers().GenerationConfig
        model.generation_config = generation_config.from_pretrained(folder)
    _refuse_saving(model, folder)


def _bytes_of_experts(converted: ConvertedCheckpoint, layer: int) -> int:
    prefix = _experts_prefix(converted, layer)
    tensors = converted.checkpoint.tensors
    return sum(info.size_bytes for name, info in tensors.items() if name.startswith(prefix))


def _format_of(converted: ConvertedCheckpoint, module: str) -> str | None:
    """The format of a module whose codes are on disk; None for all others.

    config.json passes over modules that are not linear, so that it would give a norm a format.
    """
    format = converted.format_of(module)
    if format is None or len(converted.tensor_names(module, format)) < 2:
        return None
    return format


def _check_same_model(model: PreTrainedModel, converted: ConvertedCheckpoint) -> None:
    """Refuse a model that is not of the architecture and the sizes of the checkpoint."""
    path, model_type = converted.checkpoint.path, model.config.model_type
    if converted.checkpoint.config["model_type"] != model_type:
        raise UnsupportedError(
            f"{path}: experts of a {converted.checkpoint.config['model_type']}, but the model is a "
            f"{model_type}"
        )
    config = model.config.to_dict()
    found = converted.architecture.read_config(config)
    for field, label in _SAME.items():
        has, wanted = getattr(found, field), getattr(converted.moe, field)
        if has != wanted:
            raise UnsupportedError(
                f"{path}: {label} {_text(wanted)}, but the model has {_text(has)}; use the "
                "checkpoint that was made from it"
            )


def _text(value: object) -> str:
    if isinstance(value, ActFn):
        return f"{value.name} (alpha {value.alpha:g}, limit {value.limit})"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_holders(
    model: PreTrainedModel, holders: Mapping[int, _Holder], converted: ConvertedCheckpoint
) -> None:
    """Refuse a model whose experts are not called as ours are."""
    if (routing := converted.architecture.routing) is not None:
        raise UnsupportedError(
            f"{type(model).__name__}: its router {routing}, which our experts do not do; let "
            "transformers or an engine load this checkpoint, or call `load_experts` yourself"
        )
    wanted = converted.moe.sparse_layers
    if tuple(holders) != wanted:
        raise UnsupportedError(
            f"{type(model).__name__}: experts in layers {_text(tuple(holders)) or 'none'}, but "
            f"{_text(wanted)} are wanted: a module `experts` each, as transformers 5 builds it"
        )
    for layer, holder in holders.items():
        experts = holder.experts
        if not isinstance(experts, FusedExperts | _OfSequences) and not _holds_all(experts):
            raise UnsupportedError(
                f"{type(model).__name__}: the experts of layer {layer} are a "
                f"{type(experts).__name__}, but one module that holds the weights of all of them, "
                "called with hidden states, ids and weights, is wanted, as transformers 5 builds it"
            )


def _holds_all(experts: nn.Module) -> bool:
    """Whether one module has the weights of all experts, as a stack or one below the other."""
    down = getattr(experts, "down_proj", None)
    if down is None:
        down = getattr(getattr(experts, "mlp", None), "w2", None)
    return isinstance(down, nn.Parameter)


def _refuse_saving(model: PreTrainedModel, folder: Path) -> None:
    """What save_pretrained would write, nobody could load."""

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            f"a model on moequant's experts cannot be saved; copy the checkpoint: {folder}"
        )

    model.save_pretrained = save_pretrained
