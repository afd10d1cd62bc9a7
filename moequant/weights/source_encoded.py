"""The quantized weights of a source, found by the names of their tensors and checked by headers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import Place, find_architecture
from moequant.storage.headers import DTYPES, TensorInfo, dtype_name
from moequant.weights.converted import NOT_TOGETHER, stored_places, undescribed
from moequant.weights.encoded import EncodedInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.dialects import Dialect
    from moequant.dialects.tensors import Block
    from moequant.models import Architecture, MoeConfig

    Tensors = Mapping[str, TensorInfo]
    FormatOf = Callable[[str], str | None]
    BlockOf = Callable[[str], Block | None]


def encoded_weights(
    tensors: Tensors,
    config: Mapping[str, Any],
    quantization_config: Mapping[str, Any],
    dialect: Dialect,
    own: Sequence[Architecture],
) -> dict[str, EncodedInfo]:
    """Every quantized weight by name.

    Raises:
        CheckpointError: a tensor is missing, of another dtype or shape than it must have, or not
            quantized by config.json.
        UnsupportedError: an unknown architecture, where the dialect stacks experts, or a
            quantization that we cannot read.
    """
    format_of = dialect.reader(quantization_config, weights_only=True)
    if dialect.stacks:
        architecture = find_architecture(config, own, names=tensors)
        moe = architecture.read_config(config)
        found = _in_stacks(tensors, architecture, moe, dialect, format_of)
    else:
        block_of = dialect.block_reader(quantization_config)
        found = _on_their_own(tensors, dialect, format_of, block_of)
    return {info.name: info for info in found}


def _on_their_own(
    tensors: Tensors, dialect: Dialect, format_of: FormatOf, block_of: BlockOf
) -> Iterator[EncodedInfo]:
    """Quantized weights whose codes and scales are tensors of their own."""
    telling = dialect.telling_suffixes
    seen: set[str] = set()
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf not in telling or module in seen:
            continue
        seen.add(module)
        format = format_of(module)
        if format is None:
            raise undescribed(name)
        suffixes = dialect.encoding(format).suffixes
        parts = {s: tensors[n] for s in suffixes if (n := f"{module}.{s}") in tensors}
        block = block_of(module)
        yield EncodedInfo(
            module=module,
            shape=encoded_shape(module, dialect, format, parts, block),
            format=format,
            dialect=dialect,
            places={part.name: Place(tensor=part.name) for part in parts.values()},
            parts=tuple(parts.values()),
            size_bytes=sum(part.size_bytes for part in parts.values()),
            block=block,
        )


def encoded_shape(
    module: str, dialect: Dialect, format: str, parts: Tensors, block: Block | None
) -> tuple[int, int]:
    """N and K of a quantized weight, by the headers of its tensors.

    Args:
        module: the weight's module.
        dialect: that of its tensors' names.
        format: its format by config.json.
        parts: its tensors by suffix, in the order of the encoding's suffixes.
        block: rows and columns that share a scale, where config.json states them.

    Raises:
        CheckpointError: a tensor is missing, or its dtype or shape is not that of the format.
        UnsupportedError: as `Dialect.from_disk`, or a dtype that torch does not have.
    """
    kinds = tuple((suffix, part.dtype, part.shape) for suffix, part in parts.items())
    try:
        return _shape_of(dialect, format, kinds, block, "weight")
    except (CheckpointError, UnsupportedError):
        return _shape_of(dialect, format, kinds, block, module)  # whose error names the module


def check_values(
    module: str,
    dialect: Dialect,
    format: str,
    parts: Tensors,
    block: Block | None,
    values: Mapping[str, Tensor],
) -> None:
    """Check some tensors of a quantized weight as decoding it does; of the others, headers.

    Args:
        module: as for `encoded_shape`, as are all but the last.
        dialect: that of its tensors' names.
        format: its format by config.json.
        parts: its tensors by suffix; `encoded_shape` accepts them.
        block: rows and columns that share a scale, where config.json states them.
        values: what was read of it, by suffix.

    Raises:
        CheckpointError: a value that decoding refuses, such as a negative global scale.
        UnsupportedError: a scale with values that the format's scale dtype cannot hold.
    """
    tensors = {
        f"{module}.{suffix}": values[suffix]
        if suffix in values
        else _without_data(part.dtype, part.shape)
        for suffix, part in parts.items()
    }
    dialect.from_disk(module, format, tensors, block=block)


# torch makes tensors without data slowly.
@lru_cache(maxsize=1 << 10)
def _without_data(dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


# A model has few kinds of weights.
@lru_cache(maxsize=1 << 10)
def _shape_of(
    dialect: Dialect,
    format: str,
    kinds: tuple[tuple[str, str, tuple[int, ...]], ...],
    block: Block | None,
    module: str,
) -> tuple[int, int]:
    """N and K of a weight whose parts have these suffixes, dtypes and shapes, if they fit."""
    tensors = {}
    for suffix, dtype, shape in kinds:
        if dtype not in DTYPES:
            raise UnsupportedError(f"{module}.{suffix}: dtype {dtype}; torch has no such dtype")
        tensors[f"{module}.{suffix}"] = _without_data(dtype, shape)
    N, K = dialect.from_disk(module, format, tensors, block=block).shape
    return N, K


def _in_stacks(
    tensors: Tensors,
    architecture: Architecture,
    moe: MoeConfig,
    dialect: Dialect,
    format_of: FormatOf,
) -> Iterator[EncodedInfo]:
    """Quantized experts, which the dialect stacks in tensors that the architecture names."""
    for layer in (*moe.sparse_layers, *moe.optional_layers):
        for projection in moe.projections:
            for expert in range(moe.experts):
                name = architecture.expert_tensor(layer, expert, projection)
                module = name.removesuffix(".weight")
                format = format_of(module)
                if format is None:
                    continue
                places = stored_places(architecture, moe, dialect, module, format)
                if not any(place.tensor in tensors for place in places.values()):
                    break
                shape = moe.shape(projection)
                specs = dialect.specs(module, format, shape)
                yield EncodedInfo(
                    module=module,
                    shape=shape,
                    format=format,
                    dialect=dialect,
                    places=places,
                    parts=tuple(
                        _stack(tensors, place, dtype_name(specs[n].dtype))
                        for n, place in places.items()
                    ),
                    size_bytes=sum(spec.size_bytes for spec in specs.values()),
                )


def _stack(tensors: Tensors, place: Place, dtype: str) -> TensorInfo:
    """The tensor that holds a part of an expert, with the dtype and shape that it must have."""
    if place.tensor not in tensors:
        raise CheckpointError(f"{place.tensor}: missing; {NOT_TOGETHER}")
    info = tensors[place.tensor]
    if (info.dtype, info.shape) != (dtype, place.extents):
        raise CheckpointError(
            f"{place.tensor}: {info.dtype} {list(info.shape)}, but by config.json it is "
            f"{dtype} {list(place.extents)}; {NOT_TOGETHER}"
        )
    return info
