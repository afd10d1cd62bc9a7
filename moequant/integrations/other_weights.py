"""What a converted checkpoint holds besides converted experts, as a transformers model takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from moequant.formats import STATIC_SCHEMES, dequantize

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from moequant.runtime.layer_reader import LayerReader
    from moequant.weights.converted import ConvertedCheckpoint


def other_tensors(
    reader: LayerReader, layers: Sequence[int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """All tensors but the experts of `layers`, on the device, under their names on disk.

    Args:
        reader: of the checkpoint.
        layers: those with converted experts.
        dtype: of weights that are dequantized.
    """
    converted = reader.converted
    experts = tuple(experts_prefix(converted, layer) for layer in layers)
    # transformers' models have no modules for multi-token prediction.
    mtp = tuple(experts_prefix(converted, layer) for layer in converted.moe.optional_layers)
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


def experts_prefix(converted: ConvertedCheckpoint, layer: int) -> str:
    """The common prefix of the names of a layer's expert tensors, which no other tensor has."""
    head, found, _ = converted.expert_module(layer, 0, "down").partition(".experts.")
    assert found, "every pattern in the architecture table contains .experts."
    return head + found


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _format_of(converted: ConvertedCheckpoint, module: str) -> str | None:
    """The format of a module with quantized weights on disk; None for other modules.

    The tensors on disk decide, because config.json alone would also give norms a format.
    """
    format = converted.format_of(module)
    if format is None or len(converted.tensor_names(module, format)) < 2:
        return None
    return format
