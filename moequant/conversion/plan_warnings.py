"""What a user should know before a conversion: which engines load the output, and warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moequant.compatibility import Facts, Verdict, judge
from moequant.compatibility.checkpoint_facts import facts_of_model
from moequant.conversion.units import Copy
from moequant.formats import get_format
from moequant.models import ROUTED_EXPERTS, SHARED_EXPERTS
from moequant.storage.documents import non_finite_text
from moequant.weights.source_model import quantization_config_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from moequant.conversion.units import Item
    from moequant.dialects.base import Dialect
    from moequant.models import Model
    from moequant.weights.encoded import EncodedInfo
    from moequant.weights.source_model import SourceModel


def engine_verdicts(
    formats: Mapping[str, str],
    source: SourceModel,
    dialect: Dialect,
    config: Mapping[str, Any],
    static: Collection[str] = frozenset(),
) -> tuple[Verdict, ...]:
    """Whether engines load the output, whose quantized modules have these `formats`.

    `static` are the modules whose input has a static scale.
    """
    if not formats:
        return ()
    roles, layers = source.model.roles, source.model.moe.sparse_layers
    architecture = source.model.architecture
    experts = {
        name.removesuffix(".weight"): info
        for name, info in source.weights.items()
        if roles[name].role == ROUTED_EXPERTS and roles[name].layer in layers
    }
    routed = {formats[m] for m in experts if m in formats}
    shared = {
        formats.get(name.removesuffix(".weight"))
        for name in source.weights
        if roles[name].role == SHARED_EXPERTS
        and roles[name].layer in layers
        and name.endswith(".weight")
    }
    facts = Facts(
        **facts_of_model(config, architecture, source.model.moe),
        dialect=dialect.name,
        formats=frozenset(f for module, f in formats.items() if module not in experts),
        experts=tuple(dict.fromkeys(formats[m] for m in experts if m in formats)),
        ragged=any(
            len(info.shape) == 2 and info.shape[0] % get_format(format).block[0]
            for name, info in source.weights.items()
            if (format := formats.get(name.removesuffix(".weight"))) is not None
        ),
        static=not experts.keys().isdisjoint(static),
        shared_apart=bool(routed) and not shared <= routed,
        some_kept=any(module not in formats for module in experts),
    )
    return tuple(judge(facts))


def warnings_of_source(
    source: SourceModel, back: Sequence[EncodedInfo], config: Mapping[str, Any]
) -> list[str]:
    """Unexpected changes to a quantized source, where the weights `back` become BF16."""
    warnings = []
    if quantization_config_of(config) is not None and source.dialect is None:
        warnings.append(
            "the source has a quantization_config, in config.json or hf_quant_config.json, but "
            "its weights are not quantized; the entry is replaced"
        )
    if back:
        warnings.append(
            f"{len(back)} weights that no rule converts, such as {back[0].name}, are stored as "
            f"{', '.join(dict.fromkeys(info.format for info in back))}; they become BF16, "
            "because not all engines of this dialect read these formats"
        )
    if source.dropped:
        warnings.append(
            f"{len(source.dropped)} calibrated scales of activations or of the KV cache, such as "
            f"{source.dropped[0].name}, are not copied: in the output, only weights are quantized"
        )
    return warnings


def warnings_of_config(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Of NaN and infinities in config.json, which `path` is, for messages.

    Not in its quantization_config, which is replaced. They are no error: released models of Mamba
    layers have `"time_step_limit": [0.0, Infinity]`.
    """
    copied = {key: value for key, value in config.items() if key != "quantization_config"}
    if found := non_finite_text(copied):
        yield (
            f"{path}: {found}. The output's is the same: correct the source's, unless the model "
            "was released so"
        )


def warnings_of_experts_apart(items: Iterable[Item], model: Model) -> list[str]:
    """Of experts that a BF16 output has one by one where the plain release stacks them."""
    names = [
        item.name
        for item in items
        if isinstance(item, Copy) or (item.is_plain and item.stack is None)
    ]
    apart = [
        name
        for name in names
        if (role := model.roles.get(name))
        and role.role == ROUTED_EXPERTS
        and role.expert is not None
    ]
    if model.architecture.stacked is None or not apart:
        return []
    return [
        f"{len(apart)} expert weights, such as {apart[0]}, stay separate, but the BF16 release of "
        f"{model.architecture.name} stacks them and transformers may expect stacks: they are not "
        "quantized, or the architecture has no stacked.transposed"
    ]
