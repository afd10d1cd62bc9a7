"""Apply a recipe: which weight gets which format, and which weights form a unit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from moequant.conversion.activation_scales import (
    activation_scales_of,
    check_file_used,
    warnings_of_scales,
)
from moequant.conversion.recipe import KEEP
from moequant.conversion.units import Unit, Weight
from moequant.conversion.weighted_search import (
    options_of,
    rounding_of,
    warnings_of_search,
)
from moequant.errors import RecipeError
from moequant.formats import get_format
from moequant.models import CONVERTIBLE_ROLES, ROUTED_EXPERTS
from moequant.weights.encoded import EncodedInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from moequant.conversion.recipe import Recipe, Rule
    from moequant.models import Model, TensorRole
    from moequant.statistics import InputScales, Statistics
    from moequant.weights.source_model import SourceModel
    from moequant.weights.source_weights import WeightInfo


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a recipe does with the weights that its rules match.

    Attributes:
        units: what is converted, in natural order.
        dequantized: format by name of the quantized weights that are dequantized.
        kept: names of the quantized weights that a rule keeps.
        groups: names of the convertible weights, in fused sets.
        warnings: one sentence each.
    """

    units: list[Unit]
    dequantized: dict[str, str]
    kept: set[str]
    groups: list[tuple[str, ...]]
    warnings: list[str]


def apply_recipe(
    tensors: Mapping[str, WeightInfo],
    roles: Mapping[str, TensorRole],
    recipe: Recipe,
    layer_count: int,
    fused: Iterable[Sequence[str]],
    statistics: Statistics | None = None,
    input_scales: InputScales | None = None,
    *,
    predictable: bool = False,
) -> Assignment:
    """Apply the recipe's rules to the convertible weights, and plain formats to quantized ones.

    `layer_count` is without layers for multi-token prediction; `fused` has the last name components
    of the linear layers of each fused set; `statistics` and `input_scales` are those of the routed
    experts' inputs, and `predictable` says whether weights predict these.

    Raises:
        StatisticsError: nothing uses the scales, or one is missing.
        RecipeError: nothing matches, or weights that need one format get different ones.
    """
    chosen, dequantized, kept, used = _by_rules(tensors, roles, recipe, layer_count)
    _check_useful(chosen, dequantized, recipe, tensors, roles, layer_count)
    formats = dequantized | {name: _described(rule) for name, rule in chosen.items()}
    check_whole_layers(formats, roles)
    check_file_used(chosen.values(), input_scales)
    warnings = [
        f"rules[{i}] of the recipe applies to no tensor of this checkpoint"
        for i, rule in enumerate(recipe.given_rules)
        if id(rule) not in used
    ]
    groups = group_fused(tensors, roles, fused)
    make = partial(
        _unit,
        chosen=chosen,
        tensors=tensors,
        roles=roles,
        statistics=statistics,
        input_scales=input_scales,
        predictable=predictable,
    )
    units = [unit for group in groups if (unit := make(group))]
    warnings += warnings_of_search(units, statistics)
    names = [w.info.name for unit in units if not unit.is_static for w in unit.weights]
    warnings += warnings_of_scales([n for n in names if chosen[n].activation_scales is not None])
    _check_dequantized_together(groups, dequantized, tensors)
    return Assignment(
        units=units, dequantized=dequantized, kept=kept, groups=groups, warnings=warnings
    )


def _by_rules(
    tensors: Mapping[str, WeightInfo],
    roles: Mapping[str, TensorRole],
    recipe: Recipe,
    layer_count: int,
) -> tuple[dict[str, Rule], dict[str, str], set[str], set[int]]:
    """What rules say of weights, each by the first rule that matches it.

    Returns:
        The rule by name of each weight that is converted; the plain format of each that is
        dequantized; the quantized weights that a rule keeps; and `id` of each rule that matches.
    """
    chosen: dict[str, Rule] = {}
    dequantized: dict[str, str] = {}
    kept: set[str] = set()
    used: set[int] = set()
    for name, info in tensors.items():
        role, encoded = roles[name], isinstance(info, EncodedInfo)
        if len(info.shape) != 2 or not (encoded or role.role in CONVERTIBLE_ROLES):
            continue
        rule = recipe.rule_for(name, role, layer_count)
        if rule is None:
            continue
        used.add(id(rule))
        if rule.format == KEEP:
            kept |= {name} if encoded else set()
            continue
        if get_format(rule.format).is_plain:
            if encoded:
                dequantized[name] = rule.format
        elif role.role in CONVERTIBLE_ROLES:
            chosen[name] = rule
    return chosen, dequantized, kept, used


def keeping_units(
    kept: Mapping[str, EncodedInfo],
    groups: Iterable[Sequence[str]],
    roles: Mapping[str, TensorRole],
) -> list[Unit]:
    """Units for weights that a rule keeps quantized: codes and scales do not change.

    Raises:
        RecipeError: the rule keeps a part of what engines merge.
    """
    together = [group for group in groups if not kept.keys().isdisjoint(group)]
    for group in together:
        if others := [name for name in group if name not in kept]:
            first = next(name for name in group if name in kept)
            raise RecipeError(
                f"{first} would stay quantized and {others[0]} not, but engines merge them; widen "
                "the rule to both"
            )
    grouped = {name for group in together for name in group}
    alone = [(name,) for name in kept if name not in grouped]
    return [
        Unit(
            weights=tuple(Weight(info=kept[name], role=roles[name].role) for name in group),
            format=kept[group[0]].format,
            options=get_format(kept[group[0]].format).resolve_options(),
        )
        for group in (*together, *alone)
    ]


def _check_useful(
    chosen: Mapping[str, Rule],
    dequantized: Mapping[str, str],
    recipe: Recipe,
    tensors: Mapping[str, WeightInfo],
    roles: Mapping[str, TensorRole],
    layer_count: int,
) -> None:
    """Check that the recipe changes anything; raises RecipeError with the reason if not."""
    if chosen or dequantized:
        return
    formats = {rule.format for rule in recipe.rules}
    plain = all(f != KEEP and get_format(f).is_plain for f in formats)
    if plain and not any(isinstance(info, EncodedInfo) for info in tensors.values()):
        raise RecipeError(
            f"{', '.join(formats)} dequantizes weights, but this checkpoint has no quantized ones; "
            "give a format to convert into"
        )
    example = next(name for name in tensors if roles[name].role == ROUTED_EXPERTS)
    raise RecipeError(
        "the recipe converts nothing of this checkpoint; check roles, layers (here 0 to "
        f"{layer_count - 1}) and match, which is compared with names such as {example}"
    )


def _check_dequantized_together(
    groups: Iterable[Sequence[str]],
    dequantized: Mapping[str, str],
    tensors: Mapping[str, WeightInfo],
) -> None:
    """Check that all quantized weights of a fused set are dequantized, or none."""
    for names in groups:
        quantized = [name for name in names if isinstance(tensors[name], EncodedInfo)]
        left = [name for name in quantized if name not in dequantized]
        if left and len(left) < len(quantized):
            plain = next(name for name in quantized if name in dequantized)
            raise RecipeError(
                f"{plain} would become {dequantized[plain]} and {left[0]} stay quantized, but "
                "engines merge them; widen the rule to both"
            )


def check_whole_layers(formats: Mapping[str, str], roles: Mapping[str, TensorRole]) -> None:
    """Check that all experts of a layer get one format, because engines run them in one kernel.

    `formats` has the format of every weight that is not kept. Raises RecipeError.
    """
    first: dict[int | None, tuple[str, str]] = {}
    for name, role in roles.items():
        if role.role != ROUTED_EXPERTS:
            continue
        format = formats.get(name, "kept")
        reference, expected = first.setdefault(role.layer, (name, format))
        if format != expected:
            raise RecipeError(
                f"{name} would become {format} and {reference} {expected}, but the experts of one "
                "layer must share a format; widen the rule to the whole layer"
            )


def group_fused(
    tensors: Iterable[str],
    roles: Mapping[str, TensorRole],
    fused: Iterable[Sequence[str]],
) -> list[tuple[str, ...]]:
    """The names of convertible weights, grouped into fused sets, in order of the first name."""
    set_of = {leaf: i for i, leaves in enumerate(fused) for leaf in leaves}
    groups: dict[tuple[str, object], list[str]] = {}
    for name in tensors:
        if roles[name].role not in CONVERTIBLE_ROLES or not name.endswith(".weight"):
            continue
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        groups.setdefault((parent, set_of.get(leaf, leaf)), []).append(name)
    return [tuple(names) for names in groups.values()]


def _unit(
    names: Sequence[str],
    *,
    chosen: Mapping[str, Rule],
    tensors: Mapping[str, WeightInfo],
    roles: Mapping[str, TensorRole],
    statistics: Statistics | None,
    input_scales: InputScales | None,
    predictable: bool,
) -> Unit | None:
    rules = [chosen[name] for name in names if name in chosen]
    if not rules:
        return None
    own = [roles[name] for name in names]
    resolved = [
        (
            rule.format,
            options_of(rule, own, statistics, predictable=predictable),
            rounding_of(rule, own, statistics),
            rule.activation_scales,
        )
        for rule in rules
    ]
    format, options, rounding, _ = resolved[0]
    if resolved.count(resolved[0]) < len(names):
        raise RecipeError(
            f"engines merge {' and '.join(names)}, so they need one format with the same options "
            "and activation_scales; "
            "widen the rule to all of them"
        )
    return Unit(
        weights=tuple(
            Weight(info=tensors[name], role=role.role, expert=_expert_of(role))
            for name, role in zip(names, own, strict=True)
        ),
        format=format,
        options=options,
        rounding=rounding,
        # Naming options asks for the quantizer's numbers.
        lossless=not any(rule.options for rule in rules),
        activation_scales=activation_scales_of(rules[0], names, own, statistics, input_scales),
    )


def _described(rule: Rule) -> str:
    """A rule's format, and whether activations have static scales, which layers must share too."""
    if rule.activation_scales is None:
        return rule.format
    return f"{rule.format} with activation_scales"


def _expert_of(role: TensorRole) -> tuple[int, int, str] | None:
    if role.layer is None or role.expert is None or role.projection is None:
        return None
    return role.layer, role.expert, role.projection


def units_of_formats(source: SourceModel, formats: Mapping[str, str]) -> tuple[Unit, ...]:
    """Units for an output that another tool wrote, whose `formats` are known by name of weight.

    Raises:
        UnsupportedError: a weight is stored in an unsupported dtype.
    """
    weights: dict[str, dict[str, Weight]] = {}
    for name, format in formats.items():
        weight = Weight(info=source.weights[name], role=source.model.roles[name].role)
        weight.check_dtype()
        weights.setdefault(format, {})[name] = weight
    return tuple(
        Unit(
            weights=tuple(of_format[name] for name in names),
            format=format,
            options=get_format(format).resolve_options(),
        )
        for format, of_format in weights.items()
        for names in _sets(of_format, source.model)
    )


def _sets(names: Iterable[str], model: Model) -> Iterator[tuple[str, ...]]:
    """The fused sets; weights that no recipe can convert are single."""
    names = tuple(names)
    yield from group_fused(names, model.roles, model.architecture.fused)
    yield from ((name,) for name in names if model.roles[name].role not in CONVERTIBLE_ROLES)
