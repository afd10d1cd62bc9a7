"""Defects that the scales of a checkpoint show; codes are never read."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.compatibility.facts import Defect
from moequant.models import ROUTED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import Tensor

    from moequant.compatibility.modules import Module
    from moequant.dialects import Dialect
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo

LAYERS_OF_HUB = 3
"""Layers of a checkpoint on the hub whose scales are read by default: first, middle and last."""
_REMOTE_BYTES = 4096
"""What is read of a scale on the hub: a converter that writes NaN writes nothing else."""
_AT_ONCE = 16
_E8M0_NAN = 255
_FP8 = "fp8_tensor"
# How far vLLM lets the global scales of gate and up be apart without a word: torch.allclose.
_CLOSE = 1e-5


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What the scales of one module show."""

    module: Module
    weight: str = ""
    input: str = ""
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
    with ThreadPoolExecutor(_AT_ONCE, "moequant-scales") as pool:
        read = [*pool.map(lambda module: _read(checkpoint, module, dialect), wanted)]
    yield from _wrong("bad-weight-scales", [(r.module.name, r.weight) for r in read])
    for id, fp8 in (("bad-input-scales", False), ("bad-fp8-input-scales", True)):
        own = [r for r in read if (r.module.stated == _FP8) is fp8]
        yield from _wrong(id, [(r.module.name, r.input) for r in own])
    yield from _unequal(read)


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


def _read(checkpoint: Checkpoint, module: Module, dialect: Dialect) -> _Read:
    assert module.stated is not None
    encoding = dialect.encodings[module.stated]
    scales = [module.parts[s] for s in encoding.suffixes[1:] if s in module.parts]
    weight, global_scale = "", None
    for info in scales:
        if info.name.endswith(".weight_shape"):
            continue
        values = _values(checkpoint, info)
        weight = weight or _wrong_values(values, whole=values.shape == info.shape)
        if encoding.format.has_global_scale and values.numel() == 1:
            global_scale = values.float().item()
    wrong_input = ""
    for name in dialect.input_scale_specs(module.name, module.stated):
        if (of_input := checkpoint.tensors.get(name)) is not None:
            # The largest of a layer counts, so that one of FP8 may be 0.
            whole = module.stated != _FP8
            wrong_input = _wrong_values(_values(checkpoint, of_input), whole=whole)
    return _Read(module=module, weight=weight, input=wrong_input, global_scale=global_scale)


def _values(checkpoint: Checkpoint, info: TensorInfo) -> Tensor:
    """A scale, or its first rows if it is large and on the hub."""
    if checkpoint.is_local or info.size_bytes <= _REMOTE_BYTES or not info.shape:
        return checkpoint.read(info.name)
    row_bytes = max(info.size_bytes // max(info.shape[0], 1), 1)
    rows = min(max(_REMOTE_BYTES // row_bytes, 1), info.shape[0])
    return checkpoint.read(info.name, slice(0, rows))


def _wrong_values(values: Tensor, *, whole: bool) -> str:
    """What is wrong with scales, `whole` or their first rows, in words; empty if nothing is."""
    if values.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return "NaN" if bool((values.view(torch.uint8) == _E8M0_NAN).any()) else ""
    numbers = values.float()
    if bool(numbers.isnan().any()):
        return "NaN"
    if bool(numbers.isinf().any()):
        return "infinite"
    return "all zero" if whole and numbers.numel() and not bool(numbers.any()) else ""
