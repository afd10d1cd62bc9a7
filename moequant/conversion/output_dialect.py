"""The dialect of the output: the recipe's, or the first that supports architecture and formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.dialects import REGISTRY as DIALECTS
from moequant.dialects import UNQUANTIZED, get_dialect
from moequant.errors import RecipeError, UnsupportedError
from moequant.weights.encoded import EncodedInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moequant.conversion.apply_recipe import Assignment
    from moequant.conversion.recipe import Recipe
    from moequant.dialects.base import Dialect
    from moequant.models import Architecture
    from moequant.weights.source_model import SourceModel


def output_dialect(recipe: Recipe, source: SourceModel, assigned: Assignment) -> Dialect:
    """The output's dialect.

    If nothing is converted, it is the source's, or none if nothing stays quantized.
    """
    formats = list(dict.fromkeys(unit.format for unit in assigned.units))
    name = recipe.output.dialect
    if formats:
        # What a rule keeps quantized has to be written too.
        stored = {n: i.format for n, i in source.weights.items() if isinstance(i, EncodedInfo)}
        kept = [format for n, format in stored.items() if n in assigned.kept]
        together = list(dict.fromkeys((*formats, *kept)))
        return choose_dialect(name, together, source.model.architecture)
    encoded = {n for n, info in source.weights.items() if isinstance(info, EncodedInfo)}
    if encoded == assigned.dequantized.keys():
        if name is not None:
            raise RecipeError(
                f"dialect {name!r}, but every weight is dequantized; remove the dialect"
            )
        return UNQUANTIZED
    assert source.dialect is not None, "of a source with quantized weights"
    return source.dialect if name is None else get_dialect(name)


def choose_dialect(name: str | None, formats: Sequence[str], architecture: Architecture) -> Dialect:
    """The dialect called `name`, or the first that supports architecture and formats.

    Raises:
        UnsupportedError: it does not support the architecture, or no dialect supports the formats.
    """
    serving = {d.name: d for d in serving_dialects(architecture)}
    if name is not None:
        dialect = get_dialect(name)
        if name not in serving:
            carrying = [d for d in serving.values() if {*formats} <= {*d.carried}]
            choice = "; or ".join(
                f"{d.name}, which supports {', '.join(d.carried)} ({d.summary})"
                for d in carrying or serving.values()
            )
            raise UnsupportedError(
                f"the dialect {name} does not support {architecture.name}: no engine loads the "
                f"experts of a {architecture.name} checkpoint in it. Choose {choice}"
            )
        return dialect
    for dialect in serving.values():
        if {*formats} <= {*dialect.carried}:
            return dialect
    raise UnsupportedError(
        f"no dialect supports all of {', '.join(formats)} in one checkpoint; choose fewer formats"
    )


def serving_dialects(architecture: Architecture) -> list[Dialect]:
    """The dialects in which engines load checkpoints of an architecture, in order."""
    return [d for d in DIALECTS.values() if _serves(d, architecture)]


def _serves(dialect: Dialect, architecture: Architecture) -> bool:
    if dialect.architectures and architecture.name not in dialect.architectures:
        return False
    if architecture.dialects is None:
        return not dialect.stacks
    return dialect.name in architecture.dialects
