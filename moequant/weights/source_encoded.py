"""The quantized weights of a source, found by the names of their tensors and checked by headers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from moequant.dialects import SOURCES as DIALECTS
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import Place, find_architecture
from moequant.storage.headers import DTYPES, TensorInfo, dtype_name
from moequant.weights.converted import stored_places
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_config import telling_suffixes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from moequant.dialects import Dialect
    from moequant.models import Architecture, MoeConfig

    Tensors = Mapping[str, TensorInfo]

_NEXT = "the weights and config.json do not belong together; fetch the checkpoint again"


def encoded_weights(
    tensors: Tensors,
    config: Mapping[str, Any],
    quantization_config: Mapping[str, Any],
    dialect: Dialect,
    own: Sequence[Architecture],
) -> dict[str, EncodedInfo]:
    """Every quantized weight by name."""
    format_of = dialect.reader(quantization_config, weights_only=True)
    if dialect.stacks:
        architecture = find_architecture(config, own, names=tensors)
        found = _in_stacks(
            tensors, architecture, architecture.read_config(config), dialect, format_of
        )
    else:
        found = _on_their_own(tensors, dialect, format_of)
    encoded: dict[str, EncodedInfo] = {}
    for info in found:
        if info.name in encoded:
            raise CheckpointError(f"{info.name}: stored twice; {_NEXT}")
        encoded[info.name] = info
    return encoded


def _on_their_own(
    tensors: Tensors, dialect: Dialect, format_of: Callable[[str], str | None]
) -> Iterator[EncodedInfo]:
    """Quantized weights whose codes and scales are tensors of their own."""
    telling = telling_suffixes(dialect)
    seen: set[str] = set()
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf not in telling or module in seen:
            continue
        seen.add(module)
        format = format_of(module)
        if format is None:
            raise CheckpointError(
                f"{name}: belongs to a quantized weight, but quantization_config says that its "
                f"module is not quantized; {_NEXT}"
            )
        names = [f"{module}.{suffix}" for suffix in dialect.encoding(format).suffixes]
        parts = {n: tensors[n] for n in names if n in tensors}
        yield EncodedInfo(
            module=module,
            shape=_shape_of(dialect, format, module, parts),
            format=format,
            dialect=dialect,
            places={n: Place(tensor=n) for n in parts},
            parts=tuple(parts.values()),
            size_bytes=sum(part.size_bytes for part in parts.values()),
        )


def _shape_of(
    dialect: Dialect, format: str, module: str, parts: Mapping[str, TensorInfo]
) -> tuple[int, int]:
    """N and K of a weight, once its headers fit each other.

    Raises:
        CheckpointError: a part is missing, or has another dtype or shape than it must.
    """
    kinds = tuple(
        (name.removeprefix(f"{module}."), info.dtype, info.shape) for name, info in parts.items()
    )
    return _shape_of_kind(dialect.name, format, kinds) or _decode_headers(
        dialect, format, module, kinds
    )


@lru_cache(maxsize=1 << 10)
def _shape_of_kind(
    dialect: str, format: str, kinds: tuple[tuple[str, str, tuple[int, ...]], ...]
) -> tuple[int, int] | None:
    """As `_shape_of`, once for weights alike; None where something is wrong with them."""
    try:
        return _decode_headers(DIALECTS[dialect], format, "weight", kinds)
    except (CheckpointError, UnsupportedError):
        return None


def _decode_headers(
    dialect: Dialect,
    format: str,
    module: str,
    kinds: Iterable[tuple[str, str, tuple[int, ...]]],
) -> tuple[int, int]:
    """What the dialect makes of tensors without data."""
    tensors = {}
    for suffix, dtype, shape in kinds:
        if dtype not in DTYPES:
            raise UnsupportedError(f"{module}.{suffix}: dtype {dtype}; torch has no such dtype")
        tensors[f"{module}.{suffix}"] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    N, K = dialect.from_disk(module, format, tensors).shape
    return N, K


def _in_stacks(
    tensors: Tensors,
    architecture: Architecture,
    moe: MoeConfig,
    dialect: Dialect,
    format_of: Callable[[str], str | None],
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
                yield EncodedInfo(
                    module=module,
                    shape=shape,
                    format=format,
                    dialect=dialect,
                    places=places,
                    parts=_stacks(tensors, dialect, module, format, shape, places),
                    size_bytes=sum(
                        spec.size_bytes for spec in dialect.specs(module, format, shape).values()
                    ),
                )


def _stacks(
    tensors: Tensors,
    dialect: Dialect,
    module: str,
    format: str,
    shape: tuple[int, int],
    places: Mapping[str, Place],
) -> tuple[TensorInfo, ...]:
    """The tensors that hold an expert's parts, each of the dtype and shape it must have.

    Raises:
        CheckpointError: one is missing or is another.
    """
    specs = dialect.specs(module, format, shape)
    found = []
    for name, place in places.items():
        if place.tensor not in tensors:
            raise CheckpointError(f"{place.tensor}: missing; {_NEXT}")
        info = tensors[place.tensor]
        wanted = (*place.extents, *specs[name].shape[1:])
        if (info.dtype, info.shape) != (dtype_name(specs[name].dtype), wanted):
            raise CheckpointError(
                f"{place.tensor}: {info.dtype} {list(info.shape)}, but by config.json it is "
                f"{dtype_name(specs[name].dtype)} {list(wanted)}; {_NEXT}"
            )
        found.append(info)
    return tuple(found)
