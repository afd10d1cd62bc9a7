"""Which weights are quantized by statistics: by a weighted search, by GPTQ, or not.

| rule of the recipe | with statistics of the weight | without |
|---|---|---|
| names no search | weighted, if the format has it | round to nearest |
| search = "weighted" | weighted | round to nearest; refused if no statistics are given at all |
| another search, or none | as named | as named |

Statistics are of the inputs of routed experts, so shared experts, attention and layers that were
not calibrated, such as those for multi-token prediction, have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.conversion.recipe import FROM_STATISTICS
from moequant.errors import RecipeError, StatisticsError
from moequant.formats import get_format
from moequant.formats.base import WEIGHTED
from moequant.models import PROJECTIONS, ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from moequant.conversion.recipe import Rule
    from moequant.conversion.rounding import GptqRounding
    from moequant.conversion.units import Unit
    from moequant.models import TensorRole
    from moequant.statistics import Statistics

_NEAREST = "none"


def options_of(
    rule: Rule, roles: Sequence[TensorRole], statistics: Statistics | None
) -> Mapping[str, str]:
    """The options for a fused set whose weights have these roles, as the table above says.

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
        measured = all(is_measured(role, statistics) for role in roles)
        options["search"] = WEIGHTED if measured else _NEAREST
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


def check_used(units: Iterable[Unit], statistics: Statistics | None) -> None:
    """Check that statistics, if there are any, are used; raises StatisticsError."""
    if statistics is not None and not any(
        uses_statistics(unit) or unit.activation_scales == FROM_STATISTICS for unit in units
    ):
        raise StatisticsError(
            f"{statistics.path}: nothing uses these statistics, because no rule converts a "
            'calibrated layer\'s experts into a format with search = "weighted", or rules name '
            'another search and neither rounding = "gptq" nor activation_scales = '
            f'"{FROM_STATISTICS}"; convert without them, or change the recipe'
        )


def is_weighted(unit: Unit) -> bool:
    """Whether the unit needs the mean squares of its input channels."""
    return unit.options.get("search") == WEIGHTED


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
    """Of searches that raise the model's error, and of weights without statistics."""
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
    for unit in units:
        if not uses_statistics(unit):
            for weight in unit.weights:
                nearest.setdefault((weight.role, unit.format), []).append(weight.info.name)
    for (role, format), names in nearest.items():
        yield (
            f"{len(names)} weights of {role} into {format}, such as {names[0]}, do not use the "
            "statistics: they have none, the rule names another search, or the format has no "
            "weighted one"
        )
