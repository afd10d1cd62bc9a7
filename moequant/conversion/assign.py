"""Which weight gets which format, and which weights are worked on together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.conversion.recipe import KEEP
from moequant.conversion.units import Unit, Weight
from moequant.errors import RecipeError
from moequant.formats import get_format
from moequant.models import CONVERTIBLE_ROLES, ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moequant.checkpoint.parts import WeightInfo
    from moequant.conversion.recipe import Recipe, Rule
    from moequant.models import TensorRole


def assign(
    tensors: Mapping[str, WeightInfo],
    roles: Mapping[str, TensorRole],
    recipe: Recipe,
    layer_count: int,
    fused: Iterable[Sequence[str]],
) -> tuple[list[Unit], list[str]]:
    """Apply the recipe's rules to the convertible weights.

    Args:
        tensors: what is known of every weight.
        roles: the role of every weight.
        recipe: what to convert.
        layer_count: layers without those for multi-token prediction.
        fused: last name components of linear layers that engines merge, by set.

    Returns:
        The units in natural order, and warnings.

    Raises:
        RecipeError: nothing matches, or the recipe splits weights that engines keep in one format.
    """
    chosen: dict[str, Rule] = {}
    used: set[int] = set()
    for name, info in tensors.items():
        role = roles[name]
        if role.role not in CONVERTIBLE_ROLES or len(info.shape) != 2:
            continue
        rule = recipe.rule_for(name, role, layer_count)
        if rule is not None:
            used.add(recipe.rules.index(rule))
            if rule.format != KEEP:
                chosen[name] = rule
    if not chosen:
        example = next(name for name in tensors if roles[name].role == ROUTED_EXPERTS)
        raise RecipeError(
            "the recipe converts nothing of this checkpoint; check roles and match, which is tried "
            f"on names such as {example}"
        )
    check_whole_layers({name: rule.format for name, rule in chosen.items()}, roles)
    warnings = [
        f"rules[{i}] of the recipe decides about no tensor of this checkpoint"
        for i in range(len(recipe.rules))
        if i not in used
    ]
    groups = group_fused(tensors, roles, fused)
    return [unit for group in groups if (unit := _unit(group, chosen, tensors, roles))], warnings


def check_whole_layers(formats: Mapping[str, str], roles: Mapping[str, TensorRole]) -> None:
    """Refuse experts of one layer in different formats: engines run them through one kernel.

    Args:
        formats: format by name of weight; weights that are kept are not in it.
        roles: the role of every tensor.

    Raises:
        RecipeError: names two experts that differ.
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
    """Names of convertible weights in the sets that engines merge, in order of their first."""
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
    chosen: Mapping[str, Rule],
    tensors: Mapping[str, WeightInfo],
    roles: Mapping[str, TensorRole],
) -> Unit | None:
    rules = [chosen[name] for name in names if name in chosen]
    if not rules:
        return None
    resolved = [(r.format, get_format(r.format).resolve_options(r.options)) for r in rules]
    format, options = resolved[0]
    if len(rules) < len(names) or any(other != (format, options) for other in resolved):
        raise RecipeError(
            f"{' and '.join(names)} are merged by engines, so they need one format with the same "
            "options; widen the rule to all of them"
        )
    return Unit(
        weights=tuple(Weight(info=tensors[n], role=roles[n].role) for n in names),
        format=format,
        options=options,
    )
