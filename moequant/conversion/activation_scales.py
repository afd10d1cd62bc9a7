"""Which weights get a static scale of their input, by a rule's `activation_scales`, and from what.

| `activation_scales` | the scale |
|---|---|
| none | no scale: activations are the format's own |
| a number | this number, which multiplies |
| "file" | of the weight's module in the file, the largest of a fused set |
| "statistics" | by the largest magnitude that the expert's input had, drawn toward its layer's |

The weights of a fused set, gate and up of an expert, multiply the same input and share one scale.
Statistics are of the inputs of routed experts; weights without them stay as without a scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moequant.conversion.recipe import FROM_FILE, FROM_STATISTICS
from moequant.conversion.weighted_search import is_measured
from moequant.errors import RecipeError, StatisticsError
from moequant.formats import get_format, static_scale_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from moequant.conversion.recipe import Rule
    from moequant.conversion.units import Unit
    from moequant.models import TensorRole
    from moequant.statistics import InputScales, Statistics


def activation_scales_of(
    rule: Rule,
    names: Sequence[str],
    roles: Sequence[TensorRole],
    statistics: Statistics | None,
    input_scales: InputScales | None,
) -> str | float | None:
    """What `Unit.activation_scales` is for a fused set of weights with these names and roles.

    Raises:
        RecipeError: the rule asks for statistics or a file that are not given.
        StatisticsError: the file has no scale of a weight.
    """
    wanted = rule.activation_scales
    if wanted == FROM_STATISTICS:
        if statistics is None:
            raise RecipeError(
                f'a rule for {rule.format} has activation_scales = "{FROM_STATISTICS}", which '
                "needs statistics: measure them with `moequant calibrate`, and give the file with "
                "--statistics"
            )
        return wanted if all(is_measured(role, statistics) for role in roles) else None
    if wanted == FROM_FILE:
        if input_scales is None:
            raise RecipeError(
                f'a rule for {rule.format} has activation_scales = "{FROM_FILE}"; give the file '
                "with --activation-scales"
            )
        return max(input_scales.scale_of(name.removesuffix(".weight")) for name in names)
    return wanted


def check_file_used(rules: Iterable[Rule], input_scales: InputScales | None) -> None:
    """Check that some rule uses the file, if there is one; raises StatisticsError."""
    if input_scales is not None and all(r.activation_scales != FROM_FILE for r in rules):
        raise StatisticsError(
            f"{input_scales.path}: nothing uses these scales of activations, because no rule that "
            f'applies has activation_scales = "{FROM_FILE}"; convert without them, or change the '
            "recipe"
        )


def warnings_of_scales(without: Sequence[str]) -> Iterator[str]:
    """Of weights whose rule wants scales from statistics, which do not have them."""
    if without:
        yield (
            f"{len(without)} weights, such as {without[0]}, get no static scale of activations: "
            "the statistics have nothing of their inputs; engines do not quantize these"
        )


def input_scale_of(unit: Unit, statistics: Statistics | None) -> Tensor | None:
    """The static scale of the input of a unit's weights, [] float32; None where there is none.

    Raises:
        StatisticsError: the statistics were damaged, or have no positive finite magnitude.
    """
    found = unit.activation_scales
    if found is None:
        return None
    if found != FROM_STATISTICS:
        return torch.tensor(found, dtype=torch.float32)
    assert statistics is not None, "the plan refuses these scales without statistics"
    places = [weight.expert for weight in unit.weights]
    amax = max(statistics.amax(*place) for place in places if place is not None)
    return static_scale_of(get_format(unit.format), amax, unit.name)
