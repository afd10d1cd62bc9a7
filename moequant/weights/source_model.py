"""A source: its architecture, and every weight by name, however it is stored.

The tensors say which weights are quantized: those with codes or scales by the names of the
source's dialect. config.json says in which format. A source in which the two contradict each other
is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from moequant.dialects import REGISTRY as DIALECTS
from moequant.dialects import find_dialect
from moequant.dialects.config_fields import QUANTIZATION_CONFIG, as_mapping
from moequant.dialects.names import ACTIVATION_SCALES, is_expert
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import find_architecture, read_model, sections_of
from moequant.storage.documents import read_document
from moequant.storage.headers import DTYPE_BITS, TensorInfo
from moequant.storage.reader import FixedFile
from moequant.weights.converted import ConvertedCheckpoint
from moequant.weights.source_encoded import encoded_weights
from moequant.weights.source_weights import unstacked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.dialects import Dialect
    from moequant.models import Architecture, Model
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.encoded import EncodedInfo
    from moequant.weights.source_weights import WeightInfo

    Tensors = Mapping[str, TensorInfo]

# What a quantized checkpoint holds and a plain one does not, in any known dialect.
CODE_DTYPES = frozenset(name for name, bits in DTYPE_BITS.items() if bits <= 8) - {"BOOL"}
"""Dtypes that hold no unquantized weights; the codes of INT4 are I32 under a name of their own."""

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
        dialect: the dialect of its quantized weights; None if it has none.
        quantization_config: the entry of config.json for them; None if it has none.
        dropped: calibrated scales of activations, which are not copied.
    """

    model: Model
    weights: Mapping[str, WeightInfo]
    dialect: Dialect | None = None
    quantization_config: Mapping[str, Any] | None = None
    dropped: tuple[TensorInfo, ...] = ()


def source_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """config.json of a source, with all of its `quantization_config`.

    Some dialects write a part of it elsewhere: at the top of config.json, or in another file.

    Raises:
        CheckpointError: such a file is malformed.
    """

    def read(file: str) -> Mapping[str, Any] | None:
        path = checkpoint.path / file
        return read_document(FixedFile.at(path)) if path.is_file() else None

    config = checkpoint.config
    before = found = quantization_config_of(config)
    for dialect in DIALECTS.values():
        found = dialect.complete(found, config, read)
    return config if found is before else {**config, "quantization_config": found}


def quantization_config_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`quantization_config` of config.json; vision models may have it in `text_config`.

    Raises:
        CheckpointError: it is not an object.
    """
    inner, top = sections_of(config)
    for where, section in (("", top), ("text_config.", inner)):
        entry = section.get(QUANTIZATION_CONFIG)
        if entry is not None:
            found = as_mapping(entry, f"config.json: {where}{QUANTIZATION_CONFIG}")
            if found:
                return found
    return None


def read_source(
    tensors: Tensors, config: Mapping[str, Any], own: Sequence[Architecture] = ()
) -> SourceModel:
    """Say what the tensors of a source are, quantized or not.

    Args:
        tensors: every tensor, in natural order.
        config: config.json, as `source_config` has it.
        own: architectures that a user's file or a record describes.

    Raises:
        CheckpointError: experts or scales are missing or have other shapes than config.json gives,
            or config.json contradicts the tensors, or has no quantization_config of quantized ones.
        UnsupportedError: an unknown architecture, an expert that matches no pattern, or an
            unsupported quantization; names the tensor or the field.
    """
    quantization_config = quantization_config_of(config)
    # Of an unknown quant_method nobody knows how it stores weights, so none is taken for plain.
    dialect = None if quantization_config is None else find_dialect(quantization_config, tensors)
    encoded: dict[str, EncodedInfo] = {}
    dropped: set[str] = set()
    if quantization_config is not None and dialect is not None:
        encoded = encoded_weights(tensors, config, quantization_config, dialect, own)
        modules = {info.module for info in encoded.values()}
        # Some writers have codes under `gate_proj` and so on, and scales of inputs under `w1`.
        modules |= {module.rpartition(".")[0] for module in modules if is_expert(module)}
        dropped = {name for name in tensors if _is_of_activations(name, modules)}
    parts = {part.name for info in encoded.values() for part in info.parts}
    rest = {n: info for n, info in tensors.items() if n not in parts and n not in dropped}
    _check_plain(rest, quantization_config)
    seen = _in_place(tensors, rest, encoded)
    model = read_model(config, seen, own)
    return SourceModel(
        model=model,
        weights=unstacked(seen, model),
        dialect=dialect if encoded else None,
        quantization_config=quantization_config if encoded else None,
        dropped=tuple(tensors[name] for name in tensors if name in dropped),
    )


def seen_as_source(
    checkpoint: Checkpoint, own: Sequence[Architecture] = ()
) -> ConvertedCheckpoint | None:
    """A quantized source, to look up which weight a tensor is part of; None for a plain source.

    Raises:
        UnsupportedError: an unknown architecture or quantization.
        CheckpointError: as `read_source`, of quantized weights.
    """
    config = source_config(checkpoint)
    quantization_config = quantization_config_of(config)
    if quantization_config is None:
        _check_plain(checkpoint.tensors, None)
        return None
    dialect = find_dialect(quantization_config, checkpoint.tensors)
    architecture = find_architecture(config, own, names=checkpoint.tensors)
    encoded = encoded_weights(checkpoint.tensors, config, quantization_config, dialect, own)
    # Where nothing is quantized, what config.json says of modules need not make sense.
    format_of = (
        dialect.reader(quantization_config, weights_only=True) if encoded else lambda _: None
    )
    return ConvertedCheckpoint(
        checkpoint=checkpoint,
        dialect=dialect,
        architecture=architecture,
        moe=architecture.read_config(config),
        format_of=format_of,
        block_of=dialect.block_reader(quantization_config),
    )


def _check_plain(tensors: Tensors, quantization_config: Mapping[str, Any] | None) -> None:
    """Refuse quantized tensors of unknown meaning, which copies without their config would lose."""
    for name, info in tensors.items():
        if info.dtype not in CODE_DTYPES and not name.endswith(_QUANTIZED_NAMES):
            continue
        found = f"{name}: stored as {info.dtype}, so this checkpoint is quantized, and"
        others = (
            "the unquantized release of this model, or one in a dialect that moequant reads: "
            f"{', '.join(DIALECTS)}"
        )
        if quantization_config is None:
            raise CheckpointError(
                f"{found} no quantization_config in config.json says how. Fetch its config.json "
                f"again; if that has none either, take {others}"
            )
        method = show(quantization_config.get("quant_method"))
        raise UnsupportedError(
            f"{found} it belongs to no weight that config.json describes ({method}). Take {others}"
        )


def _is_of_activations(name: str, modules: set[str]) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf in ACTIVATION_SCALES and (
        module in modules
        or leaf in ("k_scale", "v_scale")
        or (is_expert(module) and module.rpartition(".")[0] in modules)
    )


def _in_place(
    tensors: Tensors, rest: Tensors, encoded: Mapping[str, EncodedInfo]
) -> dict[str, TensorInfo | EncodedInfo]:
    """Tensors and weights in natural order, each weight in place of the first of its tensors."""
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
