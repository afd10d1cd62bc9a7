"""How the codes of a weight are chosen, under the scales that its format's options give.

Beside a format's own searches for scales, a rule for `nvfp4` may have `search = "gaussian"`, which
needs no statistics (`moequant.conversion.gaussian_search`). These options stand beside the format's
own in a rule of a recipe:

| option | value | meaning |
|---|---|---|
| `rounding` | `nearest` | each code is the nearest to its weight; the default |
| | `gptq` | codes minimize the error of a layer's outputs, by `moequant.quantizers.gptq` |
| `column_order` | `stored` | GPTQ rounds columns from left to right; the default |
| | `activation` | GPTQ rounds the columns with the largest mean squares first |

GPTQ needs the second moments of `moequant calibrate --hessian`. Weights without statistics, such as
those of shared experts, are rounded to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.errors import RecipeError
from moequant.formats import get_format
from moequant.formats.base import WEIGHTED, check_options

if TYPE_CHECKING:
    from collections.abc import Mapping

GPTQ = "gptq"
ROUNDING_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "rounding": ("nearest", GPTQ),
    "column_order": ("stored", "activation"),
}
"""Allowed values of each option, the default first."""


GAUSSIAN = "gaussian"
"""A value of the option `search`: a weighted search by mean squares that weights predict."""


@dataclass(frozen=True, kw_only=True)
class GptqRounding:
    """How GPTQ rounds.

    Attributes:
        activation_order: round the columns with the largest mean squares first.
    """

    activation_order: bool


def options_of_format(format: str) -> dict[str, tuple[str, ...]]:
    """Allowed values of every option that a rule for the format may have, the default first."""
    own = dict(get_format(format).options)
    if get_format(format).has_gaussian_search:
        own["search"] = (*own["search"], GAUSSIAN)
    # What can be searched by statistics can be rounded by them, too.
    return {**own, **ROUNDING_OPTIONS} if get_format(format).has_weighted_search else own


def quantizer_options(options: Mapping[str, str]) -> dict[str, str]:
    """Options as quantizers know them, to whom a weighted search is one, whatever the weights."""
    weighted = options.get("search") == GAUSSIAN
    return {**options, **({"search": WEIGHTED} if weighted else {})}


def split_options(
    format: str, options: Mapping[str, str]
) -> tuple[dict[str, str], GptqRounding | None]:
    """The values of all options of the format itself, and how its weights are rounded.

    Returns:
        The format's options with defaults filled in; the rounding, None for the nearest codes.

    Raises:
        RecipeError: an unknown option or value, or `column_order` without GPTQ.
    """
    check_options(format, options, options_of_format(format))
    own = {key: value for key, value in options.items() if key in get_format(format).options}
    resolved = get_format(format).resolve_options(quantizer_options(own)) | own
    if options.get("rounding") == GPTQ:
        resolved |= {**get_format(format).gptq_options, **own}
        activation_order = options.get("column_order") == "activation"
        return resolved, GptqRounding(activation_order=activation_order)
    if "column_order" in options:
        raise RecipeError(
            f"{format}: column_order = {options['column_order']!r} says in which order GPTQ rounds "
            "columns; add rounding = 'gptq', or remove it"
        )
    return resolved, None
