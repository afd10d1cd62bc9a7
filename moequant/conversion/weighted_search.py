"""Which weights are quantized by statistics: by a weighted search, by GPTQ, or not.

| rule of the recipe | with statistics of the weight | without |
|---|---|---|
| names no search | weighted, if the format has it | without data |
| search = "weighted" | weighted | without data; refused if no statistics are given at all |
| another search, or none | as named | as named |

Statistics are of the inputs of routed experts of layers that a forward runs. Shared experts and
attention have none, and are rounded to nearest without data. Layers for multi-token prediction have
none either, because they cannot be calibrated: "without data" is for their routed experts the
search "gaussian" where the format and the architecture have it, else round to nearest too. Codes
without statistics are the nearest, and activations have no static scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.conversion.recipe import FROM_STATISTICS
from moequant.conversion.rounding import GAUSSIAN
from moequant.errors import RecipeError, StatisticsError
from moequant.formats import get_format
from moequant.formats.base import WEIGHTED
from moequant.models import PROJECTIONS, ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from moequant.conversion.recipe import Rule
    from moequant.conversion.rounding import GptqRounding
    from moequant.conversion.units import Unit, Weight
    from moequant.models import TensorRole
    from moequant.statistics import Statistics

_NEAREST = "none"


def options_of(
    rule: Rule,
    roles: Sequence[TensorRole],
    statistics: Statistics | None,
    *,
    predictable: bool = False,
) -> Mapping[str, str]:
    """The options for a fused set whose weights have these roles, as the table above says.

    Args:
        rule: the rule of the set.
        roles: of its weights.
        statistics: if there are any.
        predictable: whether weights of this architecture predict the inputs of routed experts.

    Raises:
        RecipeError: the rule asks for a weighted search, and there are no statistics.
    """
    options = dict(rule.resolved_options)
    if not get_format(rule.format).has_weighted_search:
        return options
    if statistics is None:
        if options["search"] == WEIGHTED:
            raise RecipeError(
                f'a rule for {rule.format} has search = "weighted", which needs statistics: '
                "measure them with `moequant calibrate`, and give the file with --statistics"
            )
        return options
    named = "search" in rule.options or rule.options.get("scale_rule") == "mse"
    if not named or options["search"] == WEIGHTED:
        if all(is_measured(role, statistics) for role in roles):
            options["search"] = WEIGHTED
        elif (
            predictable
            and get_format(rule.format).has_gaussian_search
            and all(_is_uncalibrated(role, statistics) for role in roles)
        ):
            options["search"] = GAUSSIAN
        else:
            options["search"] = _NEAREST
    return options


def rounding_of(
    rule: Rule, roles: Sequence[TensorRole], statistics: Statistics | None
) -> GptqRounding | None:
    """How a fused set whose weights have these roles is rounded; None for the nearest codes.

    Raises:
        RecipeError: the rule asks for GPTQ, and there are no statistics.
        StatisticsError: it does, and they have no second moments.
    """
    if rule.rounding is None:
        return None
    wanted = f'a rule for {rule.format} has rounding = "gptq", which needs second moments'
    if statistics is None:
        raise RecipeError(
            f"{wanted}: measure them with `moequant calibrate --hessian`, and give the file with "
            "--statistics"
        )
    if not statistics.has_hessian:
        raise StatisticsError(
            f"{statistics.path}: {wanted}, but these statistics have none; measure them with "
            "`moequant calibrate --hessian`"
        )
    return rule.rounding if all(is_measured(role, statistics) for role in roles) else None


def is_measured(role: TensorRole, statistics: Statistics) -> bool:
    """Whether there are statistics of what a weight of this role multiplies."""
    return (
        role.role == ROUTED_EXPERTS
        and role.layer in statistics.layers
        and role.expert is not None
        and role.projection in PROJECTIONS
    )


def _is_uncalibrated(role: TensorRole, statistics: Statistics) -> bool:
    """Whether the role is that of a routed expert in a layer for multi-token prediction.

    Statistics have every other layer with experts: `Statistics.check_fits`.
    """
    return role.role == ROUTED_EXPERTS and role.layer not in statistics.layers


def check_used(units: Iterable[Unit], statistics: Statistics | None) -> None:
    """Check that statistics, if there are any, are used; raises StatisticsError."""
    if statistics is not None and not any(map(needs_statistics, units)):
        raise StatisticsError(
            f"{statistics.path}: nothing uses these statistics, because no rule converts a "
            'calibrated layer\'s experts into a format with search = "weighted", or rules name '
            'another search and neither rounding = "gptq" nor activation_scales = '
            f'"{FROM_STATISTICS}"; convert without them, change the recipe, or let them choose the '
            "layers that stay (--keep-sensitive)"
        )


def is_weighted(unit: Unit) -> bool:
    """Whether the unit needs the mean squares of its input channels."""
    return unit.options.get("search") == WEIGHTED


def needs_statistics(unit: Unit) -> bool:
    """Whether statistics decide the bytes of the unit: of its weights or its static scales."""
    return uses_statistics(unit) or unit.activation_scales == FROM_STATISTICS


def uses_statistics(unit: Unit) -> bool:
    """Whether statistics choose scales or codes of the unit."""
    return is_weighted(unit) or unit.rounding is not None


def weight_counts(units: Iterable[Unit]) -> tuple[int, int]:
    """How many weights are quantized by statistics, and how many are not."""
    counts = {True: 0, False: 0}
    for unit in units:
        counts[uses_statistics(unit)] += len(unit.weights)
    return counts[True], counts[False]


def warnings_of_search(units: Sequence[Unit], statistics: Statistics | None) -> Iterator[str]:
    """Of searches that raise the model's error, and of weights that use no statistics."""
    for format in dict.fromkeys(unit.format for unit in units):
        for (option, value), effect in get_format(format).warned_options.items():
            # With GPTQ, the same scales lower it: docs/quality.md.
            if any(
                u.format == format and u.rounding is None and u.options[option] == value
                for u in units
            ):
                yield (
                    f'{option} = "{value}" for {format} lowers the error of the weights, but '
                    f"raised the KL divergence of a trained model's predictions {effect}; leave it "
                    "out, or give statistics of `moequant calibrate`, which make "
                    'search = "weighted" the default'
                )
    if statistics is None:
        return
    nearest: dict[tuple[str, str], list[str]] = {}
    uncalibrated: dict[tuple[str, str], list[Weight]] = {}
    for unit in units:
        used = uses_statistics(unit) or unit.activation_scales == FROM_STATISTICS
        for weight in () if used else unit.weights:
            if weight.expert is not None and weight.expert[0] not in statistics.layers:
                search = unit.options.get("search", _NEAREST)
                uncalibrated.setdefault((unit.format, search), []).append(weight)
            else:
                nearest.setdefault((weight.role, unit.format), []).append(weight.info.name)
    for (format, search), weights in uncalibrated.items():
        layers = sorted({weight.expert[0] for weight in weights if weight.expert is not None})
        how = f'scales by search = "{search}"' if search != _NEAREST else "scales without a search"
        yield (
            f"layers {', '.join(map(str, layers))}, for multi-token prediction, have no "
            f"statistics, because `moequant calibrate` cannot run them: their {len(weights)} "
            f"weights into {format}, such as {weights[0].info.name}, get {how}, and the nearest "
            "codes"
        )
    for (role, format), names in nearest.items():
        yield (
            f"{len(names)} weights of {role} into {format}, such as {names[0]}, do not use the "
            "statistics: they have none, the rule names another search, or the format has no "
            "weighted one"
        )
