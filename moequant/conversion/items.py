"""The items of a plan: whether each tensor is quantized, dequantized or copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moequant.conversion.stack import plain_stack
from moequant.conversion.units import Copy, Unit, Weight
from moequant.errors import UnsupportedError
from moequant.models import PROJECTIONS, biases_of
from moequant.storage.headers import dtype_name
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_weights import PartInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from moequant.conversion.apply_recipe import Assignment
    from moequant.conversion.stack import Stack
    from moequant.conversion.units import Item
    from moequant.dialects import Dialect
    from moequant.models import Model
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


def unchanged_weights(
    left: Mapping[str, EncodedInfo], source: SourceModel, dialect: Dialect
) -> dict[str, EncodedInfo]:
    """Which of the quantized weights `left`, which no rule names, are copied bit for bit.

    Those that the output's dialect would write the same, and reads the source's
    `quantization_config` so: an engine that loads them from the source then loads them from the
    output. Others become
    BF16, which every engine loads together with any format. A rule that gives them a format of the
    dialect keeps them quantized, without an error if it is the format they have.

    | stored | stays in the same dialect | because |
    |---|---|---|
    | FP8 blocks, FP32 scales, `fp8` | yes | as DeepSeek-V3 and Qwen3 FP8 were released |
    | FP8 blocks, E8M0 scales, `fp8` | no | ours are FP32, and `scale_fmt` speaks of all at once |
    | FP8 blocks, E8M0 scales, `fp8-ue8m0` | yes | as Ling was released |
    | with quantized activations unlike our own | no | a config group would have to say so |
    """
    if source.quantization_config is None or not dialect.describes(source.quantization_config):
        return {}
    format_of = dialect.reader(source.quantization_config)
    return {name: info for name, info in left.items() if _is_ours(info, dialect, format_of)}


def _is_ours(info: EncodedInfo, dialect: Dialect, format_of: Callable[[str], str | None]) -> bool:
    """Whether the dialect would write the same tensors, and describe the same computation."""
    try:
        described = format_of(info.module)
    except UnsupportedError:
        return False
    if described != info.format or info.format not in dialect.carried:
        return False
    written = dialect.encoding(info.format).specs(info.module, info.shape)
    stored = dict(zip(info.places, info.parts, strict=True))
    return written.keys() == stored.keys() and all(
        stored[name].dtype == dtype_name(spec.dtype) for name, spec in written.items()
    )


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
    plain: dict[str, list[EncodedInfo]] = {}
    for name, info in source.weights.items():
        if isinstance(info, EncodedInfo) and name not in item_of and name not in unchanged:
            format = assigned.dequantized.get(name, _BESIDE_QUANTIZED)
            plain.setdefault(format, []).append(info)
    for format, infos in plain.items():
        dequantizing = dequantizing_units(infos, source.model, format, stacked=stacked)
        item_of |= {w.info.name: unit for unit in dequantizing for w in unit.weights}
    biases = biases_of(item_of, source.model.roles)
    copied: set[str] = set()
    for name, info in source.weights.items():
        found = item_of.get(name)
        if found is None:
            for stored in stored_in(info, tensors):
                if stored.name not in copied:
                    copied.add(stored.name)
                    yield Copy(info=stored, is_bias=stored.name in biases)
        elif found.name == name:
            yield found


def stored_in(info: WeightInfo, tensors: Mapping[str, TensorInfo]) -> Sequence[TensorInfo]:
    """The tensors on disk that hold a weight."""
    if isinstance(info, EncodedInfo):
        return info.parts
    return [tensors[info.place.tensor] if isinstance(info, PartInfo) else info]


def dequantizing_units(
    infos: Iterable[EncodedInfo], model: Model, format: str, *, stacked: bool
) -> Iterator[Unit]:
    """Units that write quantized weights in a plain format: those from a stack in its stack.

    With `stacked`, so are experts that the source has one by one and the plain release stacks, for
    classes of transformers that know no others: where the architecture says how the stack lies.
    """
    together: dict[tuple[str, int | None], list[tuple[EncodedInfo, Stack | None]]] = {}
    for info in infos:
        stack = plain_stack(info, model, stacked=stacked)
        key = (info.name, None) if stack is None else (stack.tensor, stack.expert)
        together.setdefault(key, []).append((info, stack))
    for of_one in together.values():
        # Gate's rows come before up's, whatever their names are.
        of_one.sort(key=lambda one: (*PROJECTIONS, None).index(model.roles[one[0].name].projection))
        yield Unit(
            weights=tuple(Weight(info=i, role=model.roles[i.name].role) for i, _ in of_one),
            format=format,
            options={},
            stack=of_one[0][1],
        )
