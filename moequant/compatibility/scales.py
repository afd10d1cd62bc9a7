"""Defects that the small tensors of quantized weights show, which are scales; not their codes."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.compatibility.facts import Defect
from moequant.compatibility.modules import MTP
from moequant.compatibility.rules import ENGINES, OWN, SERVING
from moequant.compatibility.scale_values import ScaleValues, overflow, values_of_scale
from moequant.compatibility.small_tensors import look_at
from moequant.errors import CheckpointError, UnsupportedError
from moequant.models import ROUTED_EXPERTS
from moequant.weights.encoded import EncodedInfo
from moequant.weights.source_encoded import check_values

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from torch import Tensor

    from moequant.compatibility.modules import Module
    from moequant.dialects import Dialect
    from moequant.dialects.input_scale import InputScale
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo
    from moequant.weights.source_model import SourceModel

LAYERS_OF_HUB = 3
"""Layers of a checkpoint on the hub whose scales are read by default: first, middle and last."""
_DIVISOR = ".weight_global_scale"
"""compressed-tensors' global scale, by which weights are divided; all others multiply."""
# How far vLLM lets the global scales of gate and up be apart without a word: torch.allclose.
_CLOSE = 1e-5
# And those of inputs, in absolute terms; it takes 1 for one that was not loaded yet.
_CLOSE_INPUTS = 1e-5
_NOT_LOADED = 1.0


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What the scales of one module show.

    Attributes:
        module: the module.
        bad: which of its scales are no finite numbers, in words; empty if none is.
        overflow: why some of its weights may be infinite, in words; empty if none may.
        refused: why decoding the weight would stop, in words; empty if it would not.
        is_zero: whether a scale that multiplies is all zero, and so is the weight.
        global_scale: as stored; None without one.
    """

    module: Module
    bad: str = ""
    overflow: str = ""
    refused: str = ""
    is_zero: bool = False
    global_scale: float | None = None


def scale_defects(
    checkpoint: Checkpoint,
    modules: Sequence[Module],
    dialect: Dialect,
    config: Mapping[str, Any],
    layers: Collection[int] | None,
    described: Collection[str] = (),
) -> Iterator[Defect]:
    """The defects that the scales and logical shapes of quantized layers show.

    Those of multi-token prediction are not read: engines load it for speculative decoding only.

    Args:
        checkpoint: the checkpoint.
        modules: of `modules_in`.
        dialect: the dialect of its quantized weights.
        config: its quantization_config, completed.
        layers: the layers whose scales are read; None for these and all that is in no layer.
        described: modules of which headers show a defect: these cannot be decoded.

    Raises:
        CheckpointError: a file is unreadable, or has changed.
    """
    wanted = [
        m
        for m in modules
        if m.group != MTP
        and (layers is None or m.role.layer in layers)
        and m.quantized
        and m.stated in dialect.encodings
    ]
    small = {module.name: _small_tensors(checkpoint, module, dialect) for module in wanted}
    refusal = _decoder([m for m in wanted if m.name not in described], dialect, config)

    def look(info: TensorInfo, values: Tensor) -> _Seen:
        return _Seen(
            scale=values_of_scale(values, whole=values.shape == info.shape),
            number=values.float().item() if values.numel() == 1 else None,
            refused=refusal(info, values),
        )

    seen = look_at(checkpoint, [info for infos in small.values() for info in infos], look)
    read = [_judged(module, dialect, small[module.name], seen) for module in wanted]
    yield from _of_weights("bad-weight-scales", [(r, r.bad) for r in read if r.bad])
    finite = [r for r in read if not r.bad]
    yield from _of_weights("large-weight-scales", [(r, r.overflow) for r in finite if r.overflow])
    yield from _of_weights("refused-weights", [(r, r.refused) for r in finite if r.refused])
    yield from _of_weights("zero-weight-scales", [(r, "") for r in finite if r.is_zero])
    experts = [r for r in read if r.module.role.role == ROUTED_EXPERTS]
    yield from _unequal(experts)
    inputs = [i for r in experts for i in _inputs(r.module, dialect, small[r.module.name], seen)]
    yield from _of_experts([i for i in inputs if not i.scale.of_layer])
    yield from _of_layers([i for i in inputs if i.scale.of_layer])
    yield from _unequal_inputs([i for i in inputs if i.scale.of_layer])


def stacked_scale_defects(
    checkpoint: Checkpoint, source: SourceModel, layers: Collection[int] | None
) -> Iterator[Defect]:
    """The defects that scales show, of checkpoints in which a layer's experts lie stacked.

    Args:
        checkpoint: the checkpoint.
        source: the same as a source.
        layers: the layers whose scales are read; None for all.

    Raises:
        CheckpointError: a file is unreadable, or has changed.
    """
    format_of = {
        info.places[f"{info.module}.{suffix}"].tensor: info.dialect.encoding(info.format).format
        for info in source.weights.values()
        if isinstance(info, EncodedInfo)
        and (layers is None or source.model.roles[info.name].layer in layers)
        for suffix in info.dialect.encoding(info.format).scales
    }

    def look(info: TensorInfo, values: Tensor) -> ScaleValues:
        return values_of_scale(values, whole=values.shape == info.shape)

    seen = look_at(checkpoint, [checkpoint.tensors[name] for name in format_of], look)
    bad = [(name, seen[name].bad) for name in format_of]
    large = [(name, overflow(format, seen[name].largest)) for name, format in format_of.items()]
    yield from _wrong("bad-weight-scales", ((name, detail) for name, detail in bad if detail))
    yield from _wrong("large-weight-scales", ((name, detail) for name, detail in large if detail))


def _wrong(
    id: str, found: Iterable[tuple[str, str]], engines: frozenset[str] = frozenset()
) -> Iterator[Defect]:
    """A defect of names, with the detail of the first; none without names."""
    wrong = [*found]
    if wrong:
        names = tuple(name for name, _ in wrong)
        yield Defect(id=id, names=names, detail=wrong[0][1], engines=engines)


def _of_weights(id: str, found: Sequence[tuple[_Read, str]]) -> Iterator[Defect]:
    """A defect of weights: moequant runs routed experts alone, and others run all layers."""
    experts = [one for one in found if one[0].module.role.role == ROUTED_EXPERTS]
    if len(experts) == len(found):
        groups = {frozenset[str](): found}
    else:
        serving = frozenset(engine.name for engine in SERVING.values())
        groups = {serving: found, frozenset({ENGINES[OWN].name}): experts}
    for engines, own in groups.items():
        yield from _wrong(id, [(read.module.name, detail) for read, detail in own], engines)


def _unequal(read: Sequence[_Read]) -> Iterator[Defect]:
    """Experts whose gate and up have different global scales."""
    pairs: dict[tuple[int | None, int | None], dict[str | None, _Read]] = defaultdict(dict)
    for one in read:
        if one.global_scale is not None:
            pairs[one.module.role.layer, one.module.role.expert][one.module.role.projection] = one
    different, far = [], []
    for pair in pairs.values():
        if "gate" not in pair or "up" not in pair:
            continue
        gate, up = pair["gate"].global_scale or 0.0, pair["up"].global_scale or 0.0
        if gate != up:
            different.append((pair["gate"].module.name, f"{gate:g} and {up:g}"))
            if abs(gate - up) > _CLOSE * abs(up):
                far.append(different[-1])
    id = "gate-up-global-scales"
    if far:
        yield Defect(id=id, names=tuple(name for name, _ in far), detail=far[0][1])
    elif different:
        # What vLLM takes for equal, SGLang does not.
        names = tuple(name for name, _ in different)
        yield Defect(id=id, names=names, detail=different[0][1], engines=frozenset({"SGLang"}))


@dataclass(frozen=True, kw_only=True)
class _Input:
    """The static scale of a module's input.

    Attributes:
        name: the tensor.
        module: the module.
        scale: what it may be.
        stored: the number in it; NaN for one that is not a single number.
        shown: the same in words.
    """

    name: str
    module: Module
    scale: InputScale
    stored: float
    shown: str


def _inputs(
    module: Module, dialect: Dialect, small: Iterable[TensorInfo], seen: Mapping[str, _Seen]
) -> Iterator[_Input]:
    assert module.stated is not None
    scale = dialect.input_scale(module.stated)
    for info in small:
        if scale is None or info.name != scale.name_of(module.name):
            continue
        number = seen[info.name].number
        shown = f"shape {list(info.shape)}" if number is None else f"{number:g}"
        stored = math.nan if number is None else number
        yield _Input(name=info.name, module=module, scale=scale, stored=stored, shown=shown)


def _of_experts(inputs: Iterable[_Input]) -> Iterator[Defect]:
    """The defects of scales of which each counts."""
    wrong = [(i.name, i.shown) for i in inputs if not i.scale.is_usable(i.stored)]
    yield from _wrong("bad-input-scales", wrong)


def _of_layers(inputs: Iterable[_Input]) -> Iterator[Defect]:
    """The defects of scales of which the largest of a layer counts; NaN counts as the largest."""
    layers: dict[tuple[int | None, bool], list[_Input]] = defaultdict(list)
    for one in inputs:
        # Gate and up have one input.
        layers[one.module.role.layer, one.module.role.projection == "down"].append(one)
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for together in layers.values():
        largest = max((i.stored for i in together), key=lambda x: (math.isnan(x), x))
        decides = not together[0].scale.is_usable(largest)
        for one in together:
            id = None if one.scale.is_usable(one.stored) else "unused-fp8-input-scales"
            if one.stored == 0:
                id = "zero-fp8-input-scales"
            if decides and (one.stored == largest or not math.isfinite(one.stored)):
                id = "bad-fp8-input-scales"
            if id is not None:
                found[id].append((one.name, one.shown))
    for id, wrong in found.items():
        yield from _wrong(id, wrong)


def _unequal_inputs(inputs: Iterable[_Input]) -> Iterator[Defect]:
    """Experts whose gate and up have different scales of their one input."""
    pairs: dict[tuple[int | None, int | None], dict[str | None, _Input]] = defaultdict(dict)
    for one in inputs:
        pairs[one.module.role.layer, one.module.role.expert][one.module.role.projection] = one
    found = []
    for pair in pairs.values():
        gate, up = pair.get("gate"), pair.get("up")
        if gate is None or up is None or _NOT_LOADED in (gate.stored, up.stored):
            continue
        if abs(gate.stored - up.stored) > _CLOSE_INPUTS:
            found.append((gate.name, f"{gate.shown} and {up.shown}"))
    yield from _wrong("gate-up-input-scales", found)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a small tensor shows.

    Attributes:
        scale: what it shows as a scale.
        number: its number if it is a single one.
        refused: why decoding its weight would stop, in words.
    """

    scale: ScaleValues
    number: float | None
    refused: str


def _small_tensors(checkpoint: Checkpoint, module: Module, dialect: Dialect) -> list[TensorInfo]:
    """The tensors of a module's weight that are no codes, and the scale of its input if any."""
    assert module.stated is not None
    suffixes = dialect.encodings[module.stated].beside_codes
    found = [module.parts[s] for s in suffixes if s in module.parts]
    names = dialect.input_scale_specs(module.name, module.stated)
    return [*found, *(checkpoint.tensors[n] for n in names if n in checkpoint.tensors)]


def _decoder(
    modules: Iterable[Module], dialect: Dialect, config: Mapping[str, Any]
) -> Callable[[TensorInfo, Tensor], str]:
    """A function from a tensor of some modules and its values to why decoding would stop.

    It asks the decoder itself, which gets codes without data; "" of other tensors, and of a part.
    """
    block_of = dialect.block_reader(config)
    encoded = [(module, module.encoded_parts(dialect)) for module in modules]
    owners = {
        part.name: (module, parts, suffix)
        for module, parts in encoded
        for suffix, part in parts.items()
    }

    def refusal(info: TensorInfo, values: Tensor) -> str:
        if info.name not in owners or values.shape != info.shape:
            return ""
        module, parts, suffix = owners[info.name]
        assert module.stated is not None
        block, read = block_of(module.name), {suffix: values}
        try:
            check_values(module.name, dialect, module.stated, parts, block, read)
        except (CheckpointError, UnsupportedError) as error:
            return str(error)
        return ""

    return refusal


def _judged(
    module: Module, dialect: Dialect, small: Iterable[TensorInfo], seen: Mapping[str, _Seen]
) -> _Read:
    assert module.stated is not None
    encoding = dialect.encodings[module.stated]
    scales = {f"{module.name}.{suffix}" for suffix in encoding.scales}
    bad, refused, global_scale, is_zero, product = "", "", None, False, 1.0
    for info in small:
        one = seen[info.name]
        refused = refused or one.refused
        if info.name not in scales:
            continue
        divides = info.name.endswith(_DIVISOR)
        no_divisor = divides and one.scale.largest == 0
        wrong = one.scale.bad or ("all zero" if no_divisor else "")
        bad = bad or (wrong and f"{info.name.rpartition('.')[2]}: {wrong}")
        is_zero = is_zero or (one.scale.is_zero and not divides)
        if not wrong:
            product *= 1 / one.scale.largest if divides else one.scale.largest
        if encoding.format.has_global_scale and one.number is not None:
            global_scale = one.number
    return _Read(
        module=module,
        bad=bad,
        overflow=overflow(encoding.format, product),
        refused=refused,
        is_zero=is_zero,
        global_scale=global_scale,
    )
