"""Which weights are written into tensors that hold all experts of a layer, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moequant.conversion.units import Restored, Stack, Weight
from moequant.models import ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moequant.checkpoint.encoded import EncodedInfo
    from moequant.models import Model


def stack_of(name: str, model: Model) -> Stack | None:
    """Where a weight goes in a dialect that stacks experts; None for what is no expert."""
    role, stacked = model.roles[name], model.architecture.stacked
    if role.role != ROUTED_EXPERTS:
        return None
    assert stacked is not None, "the table gives such a dialect only to those that stack"
    assert role.layer is not None, name
    assert role.expert is not None, name
    assert role.projection is not None, name
    return Stack(
        tensor=stacked.tensor(role.layer, role.projection),
        expert=role.expert,
        experts=model.moe.experts,
        interleaved=stacked.interleaved,
    )


def restored_items(infos: Iterable[EncodedInfo], model: Model) -> Iterator[Restored]:
    """Quantized weights as they are given back: those from a stack in the plain form's stack."""
    together: dict[tuple[str, int | None], list[EncodedInfo]] = {}
    for info in infos:
        place = next(iter(info.places.values()))
        key = (info.name, None) if place.expert is None else (place.tensor, place.expert)
        together.setdefault(key, []).append(info)
    for (_, expert), of_one in together.items():
        weights = tuple(Weight(info=i, role=model.roles[i.name].role) for i in of_one)
        stack = None
        if expert is not None:
            stack = stack_of(weights[0].info.name, model)
            assert stack is not None, "only experts are stacked"
            stacked, projection = (
                model.architecture.stacked,
                model.roles[weights[0].info.name].projection,
            )
            assert stacked is not None
            assert projection is not None
            turned = stacked.transposed(stacked.stack_of(projection))
            assert turned is not None, "the table says it of those that a dialect stacks"
            stack = replace(stack, transposed=turned)
        yield Restored(weights=weights, stack=stack)
