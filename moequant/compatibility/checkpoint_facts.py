"""The facts of a checkpoint that is there, from its config, headers and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moequant.act_fn import NAMES as ACT_FNS
from moequant.compatibility.defects import block_rows, header_defects
from moequant.compatibility.facts import (
    UNQUANTIZED,
    Defect,
    Facts,
    heads_in,
    keys_in,
    kv_heads_in,
    vocabulary_in,
)
from moequant.compatibility.memory import WeightSizes, weight_sizes
from moequant.compatibility.model_classes import classes_in, classes_of
from moequant.compatibility.modules import ROUTER, Module, modules_in
from moequant.compatibility.scales import LAYERS_OF_HUB, scale_defects, stacked_scale_defects
from moequant.dialects import find_dialect
from moequant.errors import MoequantError, UnsupportedError
from moequant.formats import STATIC_SCHEMES
from moequant.models import (
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    check_experts,
    dtype_in,
    find_architecture,
)
from moequant.storage.documents import non_finite_text
from moequant.weights.source_encoded import encoded_shape
from moequant.weights.source_model import (
    CODE_DTYPES,
    quantization_config_of,
    read_source,
    source_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from moequant.dialects import Dialect
    from moequant.models import Architecture, MoeConfig, TensorRole
    from moequant.storage.checkpoint import Checkpoint
    from moequant.weights.source_model import SourceModel


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A checkpoint that was looked at.

    Attributes:
        facts: what rules ask of it.
        architecture: its architecture.
        moe: sizes of its expert layers.
        layers: its layers with experts.
        layers_read: those whose scales were read.
        sizes: its bytes by how engines divide them.
    """

    facts: Facts
    architecture: Architecture
    moe: MoeConfig
    layers: tuple[int, ...]
    layers_read: tuple[int, ...]
    sizes: WeightSizes


def examine(
    checkpoint: Checkpoint, own: Sequence[Architecture] = (), *, layers: int | None = None
) -> Examined:
    """Read headers and small tensors, such as scales, of a checkpoint.

    Args:
        checkpoint: an opened checkpoint.
        own: architectures that a user's file or a record describes.
        layers: of how many layers, spread evenly, scales are read; by default all of a directory,
            and LAYERS_OF_HUB of a checkpoint on the hub.

    Raises:
        CheckpointError: a malformed config, an unreadable file, or experts that are not those of
            config.json.
        UnsupportedError: an unknown architecture, dialect or scheme, or an expert that matches no
            pattern of the architecture.
    """
    config = source_config(checkpoint)
    architecture = find_architecture(config, own, names=checkpoint.tensors)
    moe = architecture.read_config(config)
    sparse = tuple(moe.sparse_layers)
    read = _spread(sparse, layers, all_of_them=checkpoint.is_local)
    quantization_config = quantization_config_of(config)
    if quantization_config is None:
        roles = read_source(checkpoint.tensors, config, own).model.roles
        dialect, quantized = None, _NOTHING_QUANTIZED
    else:
        dialect = find_dialect(quantization_config, checkpoint.tensors)
        if _describes_nothing(dialect, quantization_config):
            read_source(checkpoint.tensors, config, own)  # whose error names the first code
        # What stacks the experts of a layer has no modules whose names engines would look up.
        source = read_source(checkpoint.tensors, config, own) if dialect.stacks else None
        try:
            quantized, roles = _of_quantized(
                checkpoint,
                source,
                dialect,
                quantization_config,
                architecture,
                moe,
                None if read == sparse else read,
                classes_in(config),
            )
        except UnsupportedError as error:
            if not _is_plain(checkpoint, config, own):
                raise
            raise UnsupportedError(
                f"{error}. No weight of this checkpoint is quantized, but engines go by the entry: "
                "remove quantization_config from config.json"
            ) from error
    return Examined(
        facts=Facts(
            **facts_of_model(config, architecture, moe),
            **quantized,
            not_finite=non_finite_text(checkpoint.config),
        ),
        architecture=architecture,
        moe=moe,
        layers=sparse,
        layers_read=() if dialect is None else read,
        sizes=weight_sizes(checkpoint.tensors, architecture, moe, dialect, roles),
    )


_NOTHING_QUANTIZED: dict[str, Any] = {
    "dialect": UNQUANTIZED, "formats": frozenset(), "experts": (), "some_kept": False,
}  # fmt: skip


def _is_plain(
    checkpoint: Checkpoint, config: Mapping[str, Any], own: Sequence[Architecture]
) -> bool:
    """Whether no weight is quantized, whatever config.json says."""
    try:
        return read_source(checkpoint.tensors, config, own).dialect is None
    except MoequantError:
        return False


def _describes_nothing(dialect: Dialect, config: Mapping[str, Any]) -> bool:
    """Whether a quantization_config has no format, as that of a quantized KV cache alone."""
    return dialect.name == "compressed-tensors" and not config.get("config_groups")


def _of_quantized(
    checkpoint: Checkpoint,
    source: SourceModel | None,
    dialect: Dialect,
    config: Mapping[str, Any],
    architecture: Architecture,
    moe: MoeConfig,
    layers: Collection[int] | None,
    classes: Collection[str],
) -> tuple[dict[str, Any], Mapping[str, TensorRole]]:
    """The facts that follow from quantized weights, and the roles of weights, as far as known.

    Scales are read of some `layers`; `source` is the checkpoint where its experts lie stacked.
    """
    roles: Mapping[str, TensorRole]
    modules: list[Module] = []
    defects: list[Defect] = []
    if source is not None:
        roles = source.model.roles
        defects += stacked_scale_defects(checkpoint, source, layers)
    else:
        tensors = checkpoint.tensors
        format_of = dialect.reader(config, weights_only=True)
        modules += modules_in(tensors, architecture, moe, dialect, format_of)
        defects += header_defects(modules, tensors, architecture, dialect, config, classes)
        roles = {f"{module.name}.weight": module.role for module in modules}
        plain = {name: info for name, info in tensors.items() if info.dtype not in CODE_DTYPES}
        check_experts(architecture, moe, roles, plain)
        described = {name for defect in defects for name in defect.names}
        _check_stated([m for m in modules if m.name not in described], dialect, config)
        defects += scale_defects(checkpoint, modules, dialect, config, layers, described)
    facts = {
        **_of_modules(modules, dialect, config),
        **_of_experts(_formats_by_layer(architecture, moe, dialect, modules, config).values()),
        "dialect": dialect.name,
        "defects": tuple(defects),
    }
    return facts, roles


def _check_stated(modules: Sequence[Module], dialect: Dialect, config: Mapping[str, Any]) -> None:
    """Check that modules without a defect are stored in the format that config.json says.

    Raises:
        CheckpointError: a module is stored in another format; names the tensor.
        UnsupportedError: as `encoded_shape`.
    """
    block_of = dialect.block_reader(config)
    for module in modules:
        if module.stated is None or not module.quantized:
            continue
        if module.stated not in dialect.encodings:
            continue
        parts = module.encoded_parts(dialect)
        encoded_shape(module.name, dialect, module.stated, parts, block_of(module.name))


def _of_modules(
    modules: Sequence[Module], dialect: Dialect, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts that follow from single modules."""
    activations_of = dialect.activations_reader(config)
    found = {activations_of(m.name) for m in modules if m.group == ROUTED_EXPERTS}
    schemes = {scheme for scheme in found if scheme is not None}
    routed = {_form(m) for m in modules if m.group == ROUTED_EXPERTS and m.quantized}
    others = [m for m in modules if m.group == "linears" and m.quantized and m.stated]
    return {
        "formats": frozenset(m.stated for m in others),
        "ragged": any(_is_ragged(m) for m in modules if m.quantized and m.group != ROUTER),
        "static": not schemes.isdisjoint(STATIC_SCHEMES),
        "fp4_activations": any(not scheme.startswith("fp8_") for scheme in schemes),
        "shared_apart": bool(routed)
        and any(
            _form(m) not in routed
            for m in modules
            if m.group == "linears" and m.role.role == SHARED_EXPERTS
        ),
        "linears": frozenset(
            (m.name.rpartition(".")[2], *m.shape)
            for m in others
            if m.shape is not None and block_rows(m) is not None
        ),
    }


def _of_experts(formats: Collection[str | None]) -> dict[str, Any]:
    """The facts that follow from the format of each layer's experts."""
    return {
        "experts": tuple(dict.fromkeys(f for f in formats if f is not None)),
        "some_kept": None in formats and any(formats),
    }


def facts_of_model(
    config: Mapping[str, Any], architecture: Architecture, moe: MoeConfig
) -> dict[str, Any]:
    """Fields of `Facts` that do not depend on how the weights are quantized."""
    model_type = str(config.get("model_type"))
    is_own = architecture.origin is not None
    # A user's file may describe a model with a function of its own.
    foreign = None if is_own or moe.act_fn.name in ACT_FNS else moe.act_fn.name
    return {
        "model_type": model_type,
        "not_loaded": architecture.tested.get("not_loaded", {}).get(model_type),
        "described": is_own or model_type in architecture.flat_model_types,
        "dtype": dtype_in(config),
        "hidden": moe.hidden,
        "intermediate": moe.intermediate,
        "expert_count": moe.experts,
        "heads": heads_in(config),
        "kv_heads": kv_heads_in(config),
        "vocabulary": vocabulary_in(config),
        "config_keys": keys_in(config),
        "classes": classes_in(config),
        # A user's file may describe another model of the same type.
        "model_classes": () if is_own else classes_of(model_type),
        "foreign_act_fn": foreign,
    }


def _formats_by_layer(
    architecture: Architecture,
    moe: MoeConfig,
    dialect: Dialect,
    modules: Sequence[Module],
    config: Mapping[str, Any],
) -> dict[int, str | None]:
    """The format of the experts of each layer; None where they are not quantized."""
    if dialect.stacks:
        format_of = dialect.reader(config, weights_only=True)
        firsts = {n: architecture.expert_tensor(n, 0, "down") for n in moe.sparse_layers}
        return {n: format_of(name.removesuffix(".weight")) for n, name in firsts.items()}
    found: dict[int, str | None] = {}
    untargeted = _reader_without_targets(dialect, config)
    for module in modules:
        if module.group == ROUTED_EXPERTS and module.role.layer is not None:
            stated = (module.stated or untargeted(module.name)) if module.quantized else None
            found[module.role.layer] = found.get(module.role.layer) or stated
    return found


def _reader_without_targets(
    dialect: Dialect, config: Mapping[str, Any]
) -> Callable[[str], str | None]:
    """A function from a module to the format of the only config group, whatever it targets.

    Engines have classes of their own that a target may name. It returns None where there is not one
    group.
    """
    groups = config.get("config_groups")
    if dialect.name != "compressed-tensors" or not isinstance(groups, dict) or len(groups) != 1:
        return lambda module: None
    (group,) = groups.values()
    alone = {"group": {**group, "targets": ["Linear"]}}
    return dialect.reader({**config, "config_groups": alone, "ignore": []}, weights_only=True)


def _form(module: Module) -> str | None:
    """The format in which a module is stored; None if it is not quantized."""
    return module.stated if module.quantized else None


def _is_ragged(module: Module) -> bool:
    rows = block_rows(module)
    return rows is not None and module.shape is not None and module.shape[0] % rows > 0


def _spread(layers: Sequence[int], number: int | None, *, all_of_them: bool) -> tuple[int, ...]:
    """`number` of the layers, the first and the last among them."""
    if number is None:
        number = len(layers) if all_of_them else LAYERS_OF_HUB
    if number >= len(layers):
        return tuple(layers)
    if number == 1:
        return tuple(layers[:1])
    last = len(layers) - 1
    return tuple(layers[round(i * last / (number - 1))] for i in range(number))
