"""Weights that their format or dialect does not support, found before any is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.errors import UnsupportedError
from moequant.formats import CONVERTIBLE
from moequant.models import CONVERTIBLE_ROLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from moequant.conversion.units import Unit, Weight
    from moequant.dialects.base import Dialect
    from moequant.models import TensorRole


def refusals_of(
    units: Iterable[Unit], dialect: Dialect, fused: Iterable[Sequence[str]]
) -> Iterator[str]:
    """One line for each reason, with the first weight it concerns and how many there are."""
    following = {leaf: {*leaves[i + 1 :]} for leaves in fused for i, leaf in enumerate(leaves)}
    kinds: dict[tuple[object, ...], list[tuple[Unit, Weight, bool]]] = {}
    for unit in units:
        leaves = [weight.module.rpartition(".")[2] for weight in unit.weights]
        for weight, leaf in zip(unit.weights, leaves, strict=True):
            rows_follow = not following.get(leaf, set()).isdisjoint(leaves)
            kind = (
                unit.format,
                weight.role,
                weight.info.shape,
                weight.info.dtype,
                rows_follow,
                unit.is_static,
            )
            kinds.setdefault(kind, []).append((unit, weight, rows_follow))
    # Weights of one kind are refused for one reason, in messages that differ by name.
    reasons: dict[str, tuple[str, list[Weight]]] = {}
    for of_kind in kinds.values():
        if (refusal := _refusal(*of_kind[0], dialect)) is not None:
            name, _, reason = refusal.partition(": ")
            reasons.setdefault(reason, (name, []))[1].extend(weight for _, weight, _ in of_kind)
    for reason, (name, weights) in reasons.items():
        more = ""
        if len(weights) > 1:
            same = len({weight.info.shape for weight in weights}) == 1
            more = f". The same applies to {len(weights) - 1} more weights"
            more += " of this shape" if same else ""
        yield f"{name}: {reason}{more}"


def unquantized_refusals(
    kept: Iterable[str], dialect: Dialect, roles: Mapping[str, TensorRole]
) -> Iterator[str]:
    """One line if linear layers stay unquantized that engines would take for quantized.

    Args:
        kept: every module with a two-dimensional weight that is not quantized in the output.
        dialect: of the output.
        roles: by tensor name.
    """
    if not dialect.quantizes_all:
        return
    left = {m: roles[n].role for m in kept if (n := f"{m}.weight") in roles}
    plain = [module for module, role in left.items() if role in CONVERTIBLE_ROLES]
    if plain:
        of = ", ".join(dict.fromkeys(left[module] for module in plain))
        yield (
            f"{plain[0]}: stays unquantized, and so do {len(plain) - 1} more, but in the dialect "
            f"{dialect.name} engines take every linear layer for quantized; give {of} a format in "
            "a recipe, or choose another dialect"
        )


def _refusal(unit: Unit, weight: Weight, rows_follow: bool, dialect: Dialect) -> str | None:
    try:
        weight.check_dtype()
        dialect.check(weight.module, unit.format, weight.info.shape, rows_follow=rows_follow)
        if unit.is_static:
            dialect.check_static(weight.module, unit.format)
    except UnsupportedError as error:
        return f"{error}{_others(unit.format, weight)}"
    return None


def _others(format: str, weight: Weight) -> str:
    """Formats that support a weight whose shape `format` does not."""
    if not _holds(format, weight):
        others = [name for name in CONVERTIBLE if _holds(name, weight)]
        if others:
            return f", or choose a format that supports this shape: {', '.join(others)}"
    return ""


def _holds(format: str, weight: Weight) -> bool:
    try:
        CONVERTIBLE[format].check_shape(weight.info.shape)
    except UnsupportedError:
        return False
    return True
