"""Defects that the scales of a checkpoint show; codes are never read."""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isinf, isnan
from typing import TYPE_CHECKING

import torch

from moequant.compatibility.facts import Defect
from moequant.models import ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.compatibility.modules import Module
    from moequant.dialects import Dialect
    from moequant.dialects.input_scale import InputScale
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo

LAYERS_OF_HUB = 3
"""Layers of a checkpoint on the hub whose scales are read by default: first, middle and last."""
_REMOTE_BYTES = 4096
"""What is read of a scale on the hub: a converter that writes NaN writes nothing else."""
_GAP_BYTES = _REMOTE_BYTES
"""What is read between two scales rather than ask twice; a request takes longer."""
_CALL_BYTES = 1 << 20
"""Scales are read together up to this size."""
_AT_ONCE = 16
_READS_A_TASK = 256
_E8M0_NAN = 255
_ZERO = "all zero"
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
        weight: what is wrong with its scales, in words; empty if nothing is.
        is_zero: whether a scale that multiplies is all zero, and so is the weight.
        global_scale: as stored; None without one.
    """

    module: Module
    weight: str = ""
    is_zero: bool = False
    global_scale: float | None = None


def scale_defects(
    checkpoint: Checkpoint, modules: Sequence[Module], dialect: Dialect, layers: Collection[int]
) -> Iterator[Defect]:
    """The defects that the scales of routed experts in some layers show.

    Raises:
        CheckpointError: a file is unreadable, or has changed.
    """
    wanted = [
        m
        for m in modules
        if m.role.role == ROUTED_EXPERTS
        and m.role.layer in layers
        and m.quantized
        and m.stated in dialect.encodings
    ]
    scales_of = {module.name: _scales_of(checkpoint, module, dialect) for module in wanted}
    seen = _look_at(checkpoint, [info for infos in scales_of.values() for info in infos])
    read = [_judged(module, dialect, scales_of[module.name], seen) for module in wanted]
    yield from _wrong("bad-weight-scales", [(r.module.name, r.weight) for r in read])
    zero = tuple(r.module.name for r in read if r.is_zero and not r.weight)
    if zero:
        yield Defect(id="zero-weight-scales", names=zero)
    yield from _unequal(read)
    inputs = [i for m in wanted for i in _inputs(m, dialect, scales_of[m.name], seen)]
    yield from _of_experts([i for i in inputs if not i.scale.of_layer])
    yield from _of_layers([i for i in inputs if i.scale.of_layer])
    yield from _unequal_inputs([i for i in inputs if i.scale.of_layer])


def _wrong(id: str, found: Sequence[tuple[str, str]]) -> Iterator[Defect]:
    names = [(name, detail) for name, detail in found if detail]
    if names:
        yield Defect(id=id, names=tuple(name for name, _ in names), detail=names[0][1])


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
    module: Module, dialect: Dialect, scales: Iterable[TensorInfo], seen: Mapping[str, _Seen]
) -> Iterator[_Input]:
    assert module.stated is not None
    scale = dialect.input_scale(module.stated)
    for info in scales:
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
    """What a scale shows: what is wrong with it, in words, and its number if it is a single one."""

    wrong: str
    number: float | None


def _scales_of(checkpoint: Checkpoint, module: Module, dialect: Dialect) -> list[TensorInfo]:
    """The scales of a module's weight, and that of its input if there is one."""
    assert module.stated is not None
    suffixes = dialect.encodings[module.stated].scales
    found = [module.parts[s] for s in suffixes if s in module.parts]
    names = dialect.input_scale_specs(module.name, module.stated)
    return [*found, *(checkpoint.tensors[n] for n in names if n in checkpoint.tensors)]


def _look_at(checkpoint: Checkpoint, scales: Iterable[TensorInfo]) -> dict[str, _Seen]:
    """What each scale shows, by name; those that lie near each other are read together."""
    calls: list[list[tuple[TensorInfo, slice | None]]] = []
    size, end, is_local = 0, ("", 0), checkpoint.is_local
    for info in sorted({info.name: info for info in scales}.values(), key=_place):
        rows = None if is_local else _first_rows(info)
        part = checkpoint.locate(info.name, rows).info
        gap = part.start - end[1] if end[0] == info.file else -1
        if not 0 <= gap <= _GAP_BYTES or size + part.size_bytes > _CALL_BYTES:
            calls.append([])
            size = 0
        calls[-1].append((info, rows))
        size, end = size + part.size_bytes, (info.file, part.stop)

    def look(calls: Sequence[Sequence[tuple[TensorInfo, slice | None]]]) -> dict[str, _Seen]:
        found = {}
        for call in calls:
            ranges = [(info.name, rows) for info, rows in call]
            read = checkpoint.read_all(ranges, gap_bytes=_GAP_BYTES)
            for (info, _), values in zip(call, read, strict=True):
                found[info.name] = _Seen(
                    wrong=_wrong_values(values, whole=values.shape == info.shape),
                    number=values.float().item() if values.numel() == 1 else None,
                )
        return found

    # A thread takes longer to start on a task than to read a few scales of a disk.
    each = _READS_A_TASK if is_local else 1
    tasks = [calls[i : i + each] for i in range(0, len(calls), each)]
    with ThreadPoolExecutor(_AT_ONCE, "moequant-scales") as pool:
        return {name: seen for found in pool.map(look, tasks) for name, seen in found.items()}


def _place(info: TensorInfo) -> tuple[str, int]:
    return info.file, info.start


def _first_rows(info: TensorInfo) -> slice | None:
    """The first rows of a large scale; None for all of another."""
    if info.size_bytes <= _REMOTE_BYTES or not info.shape:
        return None
    row_bytes = max(info.size_bytes // max(info.shape[0], 1), 1)
    rows = min(max(_REMOTE_BYTES // row_bytes, 1), info.shape[0])
    return slice(0, rows)


def _judged(
    module: Module, dialect: Dialect, scales: Iterable[TensorInfo], seen: Mapping[str, _Seen]
) -> _Read:
    assert module.stated is not None
    input_names = dialect.input_scale_specs(module.name, module.stated)
    has_global_scale = dialect.encodings[module.stated].format.has_global_scale
    weight, global_scale, is_zero = "", None, False
    for info in scales:
        if info.name in input_names:
            continue
        one = seen[info.name]
        if one.wrong == _ZERO and not info.name.endswith(_DIVISOR):
            is_zero = True
        else:
            weight = weight or one.wrong
        if has_global_scale and one.number is not None:
            global_scale = one.number
    return _Read(module=module, weight=weight, is_zero=is_zero, global_scale=global_scale)


def _wrong_values(values: Tensor, *, whole: bool) -> str:
    """What is wrong with scales, `whole` or their first rows, in words; empty if nothing is."""
    if values.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return "NaN" if bool((values.view(torch.uint8) == _E8M0_NAN).any()) else ""
    if not values.numel():
        return ""
    # The smallest and the largest say all: both are NaN where any is.
    low, high = (end.item() for end in values.float().aminmax())
    if isnan(low):
        return "NaN"
    if isinf(low) or isinf(high):
        return "infinite"
    return _ZERO if whole and low == high == 0 else ""
