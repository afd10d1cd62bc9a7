"""Units of work for an output whose formats are known, as those that other tools wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.conversion.apply_recipe import group_fused
from moequant.conversion.units import Unit, Weight
from moequant.formats import get_format
from moequant.models import CONVERTIBLE_ROLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from moequant.models import Model
    from moequant.weights.source_model import SourceModel


def units_of_formats(source: SourceModel, formats: Mapping[str, str]) -> tuple[Unit, ...]:
    """Units that quantize weights to the given formats, in fused sets.

    Args:
        source: the source.
        formats: format by name of weight, with default options.

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
