"""The items of a plan: whether each tensor is quantized, dequantized or copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.conversion.stacked_output import dequantizing_units
from moequant.conversion.units import Copy
from moequant.models import biases_of
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_weights import PartInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moequant.conversion.apply_recipe import Assignment
    from moequant.conversion.units import Item, Unit
    from moequant.storage.headers import TensorInfo
    from moequant.weights.source_model import SourceModel
    from moequant.weights.source_weights import WeightInfo


_BESIDE_QUANTIZED = "bf16"
"""The format of quantized weights that no rule matches and that cannot be copied unchanged."""


def unmatched(source: SourceModel, assigned: Assignment) -> dict[str, EncodedInfo]:
    """Quantized weights that no rule matches, by name."""
    taken = {weight.info.name for unit in assigned.units for weight in unit.weights}
    taken |= assigned.dequantized.keys()
    return {
        name: info
        for name, info in source.weights.items()
        if isinstance(info, EncodedInfo) and name not in taken
    }


def plan_items(
    tensors: Mapping[str, TensorInfo],
    source: SourceModel,
    units: Sequence[Unit],
    assigned: Assignment,
    unchanged: Mapping[str, EncodedInfo],
    *,
    stacked: bool,
) -> Iterator[Item]:
    """Units, each at the position of its first weight, and copies, in natural order.

    Quantized weights that are neither converted nor copied unchanged are dequantized; with
    `stacked`, they are stacked as in the BF16 release. A tensor with several weights is copied
    once. Biases of converted experts are copied and checked for NaN and Inf.
    """
    item_of = {w.info.name: u for u in units for w in u.weights}
    left = [
        info
        for name, info in source.weights.items()
        if isinstance(info, EncodedInfo) and name not in item_of and name not in unchanged
    ]
    plain: dict[str, list[EncodedInfo]] = {}
    for weight in left:
        format = assigned.dequantized.get(weight.name, _BESIDE_QUANTIZED)
        plain.setdefault(format, []).append(weight)
    for format, infos in plain.items():
        dequantizing = dequantizing_units(infos, source.model, format, stacked=stacked)
        item_of |= {w.info.name: unit for unit in dequantizing for w in unit.weights}
    biases = biases_of(item_of, source.model.roles)
    copied: set[str] = set()
    for name, info in source.weights.items():
        found = item_of.get(name)
        if found is None:
            for stored in _stored_in(info, tensors):
                if stored.name not in copied:
                    copied.add(stored.name)
                    yield Copy(info=stored, is_bias=stored.name in biases)
        elif found.name == name:
            yield found


def _stored_in(info: WeightInfo, tensors: Mapping[str, TensorInfo]) -> Sequence[TensorInfo]:
    """The tensors on disk that hold a weight."""
    if isinstance(info, EncodedInfo):
        return info.parts
    return [tensors[info.place.tensor] if isinstance(info, PartInfo) else info]
