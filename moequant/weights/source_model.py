"""A source seen through its quantization: weights by name, however they are stored.

Which of them are quantized, the tensors say: a module is if codes or scales by the names of the
source's dialect are there. In which format, config.json says. Where the two contradict each other
the source is refused, for one of them is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

import torch

from moequant.dialects import SOURCES as DIALECTS
from moequant.dialects import find_dialect
from moequant.dialects.names import ACTIVATION_SCALES
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import Place, find_architecture, read_model
from moequant.storage.documents import read_document
from moequant.storage.headers import DTYPE_BITS, DTYPES, TensorInfo, dtype_name
from moequant.storage.reader import FixedFile
from moequant.weights.converted import ConvertedCheckpoint, stored_places
from moequant.weights.encoded import EncodedInfo
from moequant.weights.parts import unstacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from moequant.dialects import Dialect
    from moequant.models import Architecture, Model, MoeConfig
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.parts import WeightInfo

    Tensors = Mapping[str, TensorInfo]

_NEXT = "the weights and config.json do not belong together; fetch the checkpoint again"

# What a quantized checkpoint holds and a plain one does not, in any known dialect.
_QUANTIZED_DTYPES = {name for name, bits in DTYPE_BITS.items() if bits <= 8} - {"BOOL"}
_QUANTIZED_NAMES = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
    "weight_zero_point", "input_scale", "input_global_scale", "activation_scale", "qweight",
    "qzeros", "_blocks", "_scales", ".scales",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """What a source is, and what is known of each of its weights.

    Attributes:
        model: its architecture, sizes and roles.
        weights: what is known of every tensor and weight, in natural order; experts one by one,
            quantized weights as what they decode to.
        dialect: the dialect its quantized weights are in; None where it has none.
        quantization_config: what config.json says of them; None where it has none.
        dropped: tensors that nothing of a weight is in: calibrated scales of activations.
    """

    model: Model
    weights: Mapping[str, WeightInfo]
    dialect: Dialect | None = None
    quantization_config: Mapping[str, Any] | None = None
    dropped: tuple[TensorInfo, ...] = ()


def read_source(
    tensors: Tensors, config: Mapping[str, Any], own: Sequence[Architecture] = ()
) -> SourceModel:
    """Say what the tensors of a source are, quantized or not.

    Args:
        tensors: every tensor, in natural order.
        config: config.json, as `source_config` has it.
        own: architectures that a user's file or a record describes.

    Raises:
        CheckpointError: experts are missing or not of the shapes config.json promises; codes
            without scales or of other shapes; config.json contradicts the tensors.
        UnsupportedError: an unknown architecture, an expert that no rule explains, or a
            quantization that we cannot read; names the tensor or the field.
    """
    quantization_config = _quantization_config(config)
    dialect = _find_dialect(quantization_config, tensors)
    if quantization_config is None or dialect is None:
        _check_plain(tensors, quantization_config)
        model = read_model(config, tensors, own)
        return SourceModel(model=model, weights=unstacked(tensors, model))
    encoded = _encoded(tensors, config, quantization_config, dialect, own)
    parts = {part.name for info in encoded.values() for part in info.parts}
    modules = {info.module for info in encoded.values()}
    dropped = {name for name in tensors if _is_of_activations(name, modules)}
    rest = {n: info for n, info in tensors.items() if n not in parts and n not in dropped}
    _check_plain(rest, quantization_config)
    seen: dict[str, TensorInfo | EncodedInfo] = _in_place(tensors, rest, encoded)
    model = read_model(config, seen, own)
    return SourceModel(
        model=model,
        weights=unstacked(seen, model),
        dialect=dialect if encoded else None,
        quantization_config=quantization_config if encoded else None,
        dropped=tuple(tensors[name] for name in tensors if name in dropped),
    )


def source_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """config.json of a source, its `quantization_config` with all that is said elsewhere.

    Raises:
        CheckpointError: a file that says it is malformed.
    """

    def read(file: str) -> Mapping[str, Any] | None:
        path = checkpoint.path / file
        return read_document(FixedFile.at(path)) if path.is_file() else None

    config = checkpoint.config
    before = found = _quantization_config(config)
    for dialect in DIALECTS.values():
        found = dialect.complete(found, config, read)
    return config if found is before else {**config, "quantization_config": found}


def seen_as_source(
    checkpoint: Checkpoint, own: Sequence[Architecture] = ()
) -> ConvertedCheckpoint | None:
    """What says of a tensor which quantized weight it is a part of; None of a plain checkpoint.

    Raises:
        UnsupportedError: an unknown architecture, or a quantization that we do not read.
        CheckpointError: a field of config.json has the wrong type.
    """
    config = source_config(checkpoint)
    quantization_config = _quantization_config(config)
    if quantization_config is None:
        return None
    dialect = _find_dialect(quantization_config, checkpoint.tensors)
    dialect = dialect or find_dialect(quantization_config)
    architecture = find_architecture(config, own, names=checkpoint.tensors)
    return ConvertedCheckpoint(
        checkpoint=checkpoint,
        dialect=dialect,
        architecture=architecture,
        moe=architecture.read_config(config),
        format_of=dialect.source_reader(quantization_config),
    )


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of config.json, which vision models may keep in the language model's section."""
    text_config = config.get("text_config")
    sections = (config, text_config if isinstance(text_config, dict) else {})
    found = (section.get("quantization_config") for section in sections)
    return next((entry for entry in found if isinstance(entry, dict) and entry), None)


def _find_dialect(
    quantization_config: Mapping[str, Any] | None, names: Iterable[str]
) -> Dialect | None:
    """What claims the source; of several, the first that has a last name found among `names`."""
    if quantization_config is None:
        return None
    claiming = [d for d in DIALECTS.values() if d.claims(quantization_config)]
    if len(claiming) > 1:
        leaves = {name.rpartition(".")[2] for name in names}
        claiming = [d for d in claiming if leaves & _telling_suffixes(d)] + claiming
    return claiming[0] if claiming else None


def _check_plain(tensors: Tensors, quantization_config: Mapping[str, Any] | None) -> None:
    """Refuse quantized tensors that nothing says how to read: copied, they would lose meaning."""
    for name, info in tensors.items():
        if info.dtype in _QUANTIZED_DTYPES or name.endswith(_QUANTIZED_NAMES):
            raise UnsupportedError(
                f"{name}: stored as {info.dtype}, so this checkpoint is quantized, and "
                f"{_unread(quantization_config)}. Take the unquantized release of this model, or "
                f"one in a dialect that moequant reads: {', '.join(DIALECTS)}"
            )


def _unread(quantization_config: Mapping[str, Any] | None) -> str:
    if quantization_config is None:
        return "no quantization_config in config.json says how"
    method = quantization_config.get("quant_method")
    if _find_dialect(quantization_config, ()) is None:
        return f"moequant does not read quantization_config.quant_method = {show(method)}"
    return f"no weight that config.json describes ({show(method)}) has it for a part"


def _is_of_activations(name: str, modules: set[str]) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf in ACTIVATION_SCALES and (module in modules or leaf in ("k_scale", "v_scale"))


def _in_place(
    tensors: Tensors, rest: Tensors, encoded: Mapping[str, EncodedInfo]
) -> dict[str, TensorInfo | EncodedInfo]:
    """Natural order, each encoded weight where the first of its tensors stands."""
    first: dict[str, list[EncodedInfo]] = {}
    for info in encoded.values():
        first.setdefault(info.parts[0].name, []).append(info)
    seen: dict[str, TensorInfo | EncodedInfo] = {}
    for name, tensor in tensors.items():
        if name in rest:
            seen[name] = tensor
        for info in first.get(name, ()):
            seen[info.name] = info
    return seen


def _encoded(
    tensors: Tensors,
    config: Mapping[str, Any],
    quantization_config: Mapping[str, Any],
    dialect: Dialect,
    own: Sequence[Architecture],
) -> dict[str, EncodedInfo]:
    """Every quantized weight by name."""
    format_of = dialect.source_reader(quantization_config)
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
    telling = _telling_suffixes(dialect)
    seen: set[str] = set()
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf not in telling or module in seen:
            continue
        seen.add(module)
        format = format_of(module)
        if format is None:
            raise CheckpointError(
                f"{name}: says that its weight is quantized, but quantization_config says that it "
                f"was kept as it was; {_NEXT}"
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


def _telling_suffixes(dialect: Dialect) -> set[str]:
    """Last names that no plain tensor has."""
    return {suffix for e in dialect.encodings.values() for suffix in e.suffixes} - {"weight"}


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
