"""Which weight gets which format, and which weights are worked on together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.checkpoint.headers import DTYPES
from moequant.conversion.recipe import KEEP
from moequant.errors import RecipeError, UnsupportedError
from moequant.formats import get_format
from moequant.formats.base import SOURCE_DTYPES
from moequant.models import CONVERTIBLE_ROLES, ROUTED_EXPERTS, fused_sets

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moequant.checkpoint.headers import TensorInfo
    from moequant.conversion.recipe import Recipe, Rule
    from moequant.models import TensorRole


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight of the source that will be converted."""

    info: TensorInfo
    role: str

    @property
    def module(self) -> str:
        """Its name without `.weight`."""
        return self.info.name.removesuffix(".weight")

    def check_dtype(self) -> None:
        """Refuse a source that is not plain floating point.

        Raises:
            UnsupportedError: names the weight and its dtype.
        """
        if DTYPES.get(self.info.dtype) not in SOURCE_DTYPES:
            raise UnsupportedError(
                f"{self.info.name}: stored as {self.info.dtype}, but conversion starts from BF16, "
                "F16 or F32; take the unquantized release of this model"
            )


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest piece of work: weights that engines fuse, converted together.

    An expert's gate and up are one unit, its down another.
    """

    weights: tuple[Weight, ...]
    format: str
    options: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """Its first tensor's name."""
        return self.weights[0].info.name

    @property
    def source_bytes(self) -> int:
        """Bytes read."""
        return sum(weight.info.size_bytes for weight in self.weights)

    @property
    def working_bytes(self) -> int:
        """Upper bound of the memory converting this unit takes."""
        format = get_format(self.format)
        shapes = [weight.info.shape for weight in self.weights]
        results = sum(s.size_bytes for shape in shapes for s in format.specs(shape).values())
        # Results exist twice, while tiles are joined and while codes are put in disk form.
        workspace = max(format.workspace_bytes(shape) for shape in shapes)
        return self.source_bytes + 2 * results + workspace


def assign(
    tensors: Mapping[str, TensorInfo],
    roles: Mapping[str, TensorRole],
    recipe: Recipe,
    layer_count: int,
) -> tuple[list[Unit], list[str]]:
    """Apply the recipe's rules to the convertible weights.

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
        raise RecipeError("the recipe converts nothing of this checkpoint; check roles and match")
    _check_whole_layers(chosen, roles)
    warnings = [
        f"rule {i + 1} of the recipe decides about no tensor of this checkpoint"
        for i in range(len(recipe.rules))
        if i not in used
    ]
    groups = _group(tensors, roles)
    return [unit for group in groups if (unit := _unit(group, chosen, tensors, roles))], warnings


def _check_whole_layers(chosen: Mapping[str, Rule], roles: Mapping[str, TensorRole]) -> None:
    """Engines run all experts of a layer through one kernel."""
    first: dict[int | None, tuple[str, str | None]] = {}
    for name, role in roles.items():
        if role.role != ROUTED_EXPERTS:
            continue
        format = chosen[name].format if name in chosen else None
        reference, expected = first.setdefault(role.layer, (name, format))
        if format != expected:
            raise RecipeError(
                f"{name} would become {format or 'kept'} and {reference} {expected or 'kept'}, but "
                "the experts of one layer must share a format; widen the rule to the whole layer"
            )


def _group(tensors: Iterable[str], roles: Mapping[str, TensorRole]) -> list[tuple[str, ...]]:
    """Convertible tensors in fused sets, in order of their first member."""
    set_of = {leaf: i for i, leaves in enumerate(fused_sets()) for leaf in leaves}
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
    tensors: Mapping[str, TensorInfo],
    roles: Mapping[str, TensorRole],
) -> Unit | None:
    rules = {name: chosen.get(name) for name in names}
    formats = {r and (r.format, tuple(r.options.items())) for r in rules.values()}
    if formats == {None}:
        return None
    if len(formats) > 1:
        raise RecipeError(
            f"{' and '.join(names)} are merged by engines, so they need one format with the same "
            "options; widen the rule to all of them"
        )
    rule = chosen[names[0]]
    return Unit(
        weights=tuple(Weight(info=tensors[n], role=roles[n].role) for n in names),
        format=rule.format,
        options=tuple(get_format(rule.format).resolve_options(rule.options).items()),
    )
