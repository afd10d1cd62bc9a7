"""Which weights are written to stacks, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moequant.conversion.stack import Stack
from moequant.conversion.units import Unit, Weight
from moequant.models import PROJECTIONS, ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moequant.models import Model
    from moequant.weights.encoded import EncodedInfo


def stack_of(name: str, model: Model) -> Stack | None:
    """The position of a weight in a dialect that stacks experts; None if it is not an expert's."""
    role, stacked = model.roles[name], model.architecture.stacked
    if role.role != ROUTED_EXPERTS:
        return None
    assert stacked is not None, "the table allows such a dialect only with `stacked`"
    assert role.layer is not None, name
    assert role.expert is not None, name
    assert role.projection is not None, name
    return Stack(
        tensor=stacked.tensor(role.layer, role.projection),
        expert=role.expert,
        experts=model.moe.experts,
        interleaved=stacked.interleaved,
    )


def dequantizing_units(
    infos: Iterable[EncodedInfo], model: Model, format: str, *, stacked: bool
) -> Iterator[Unit]:
    """Units that write quantized weights in a plain format: those from a stack in its stack.

    With `stacked`, so are experts that the source has one by one and the plain release stacks, for
    classes of transformers that know no others: where the architecture says how the stack lies.
    """
    together: dict[tuple[str, int | None], list[tuple[EncodedInfo, Stack | None]]] = {}
    for info in infos:
        stack = _plain_stack(info, model, stacked=stacked)
        key = (info.name, None) if stack is None else (stack.tensor, stack.expert)
        together.setdefault(key, []).append((info, stack))
    for of_one in together.values():
        # Gate's rows come before up's, whatever their names are.
        of_one.sort(key=lambda one: _order(model.roles[one[0].name].projection))
        yield Unit(
            weights=tuple(Weight(info=i, role=model.roles[i.name].role) for i, _ in of_one),
            format=format,
            options={},
            stack=of_one[0][1],
        )


def _plain_stack(info: EncodedInfo, model: Model, *, stacked: bool) -> Stack | None:
    """The position of a weight in a stack of the BF16 release; None if it is separate."""
    role, table = model.roles[info.name], model.architecture.stacked
    in_stack = next(iter(info.places.values())).expert is not None
    if table is None or role.role != ROUTED_EXPERTS or not (stacked or in_stack):
        return None
    assert role.projection is not None, info.name
    turned = table.transposed(table.stack_of(role.projection))
    if turned is None:
        assert not in_stack, "the table says it of those that a dialect stacks"
        return None
    stack = stack_of(info.name, model)
    assert stack is not None, info.name
    return replace(stack, transposed=turned, flat=table.flat)


def _order(projection: str | None) -> int:
    return -1 if projection is None else PROJECTIONS.index(projection)
