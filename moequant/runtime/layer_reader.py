"""Read the weights of expert layers from a checkpoint's files to a device.

Decisions, each with the failure it prevents:

* A layer's tensors are allocated once, on the device, and filled expert by expert. Otherwise
  stacking single experts would need a second copy of the layer.
* Bytes that are the same on disk and in memory are read straight to their destination. The first
  expert shows which they are, so that no dialect is special here.
* Other tensors are decoded on the device, because a CPU unpacks slower than it reads.
* Small tensors are decoded on the host, because decoding reads their values, which would
  synchronize with the device thousands of times per model.
"""

from __future__ import annotations

import warnings
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import torch

from moequant.errors import SlowPathWarning, UnsupportedError
from moequant.formats import STATIC_SCHEMES
from moequant.runtime.activations import MXFP4, NVFP4, NVFP4_STATIC, choice_of
from moequant.runtime.backends import Workload
from moequant.runtime.backends.stacked import (
    INPUT_SCALES,
    input_scales_in,
    name_input_scales,
    projections,
    room,
)
from moequant.runtime.inputs import check_input_scales
from moequant.runtime.packing import check_activations, pack_experts, scheme_of
from moequant.runtime.select import select
from moequant.runtime.staging import Read, Staging
from moequant.runtime.weights import ExpertWeights, check_runnable
from moequant.storage.headers import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.formats import QuantizedWeight
    from moequant.runtime.activations import ActivationsChoice
    from moequant.runtime.backends import Backend, Layout, PackedExperts
    from moequant.runtime.prepared import LayerFile, PreparedCheckpoint
    from moequant.storage.checkpoint import TensorRange
    from moequant.weights.converted import ConvertedCheckpoint
    from moequant.weights.encoded import EncodedWeight

_STATIC_OF = {"format": STATIC_SCHEMES, NVFP4: frozenset({NVFP4_STATIC})}
"""By choice of activations, the schemes of a checkpoint whose static scales it takes."""
_READ_TOGETHER = 8
"""Units whose tensors are read in the order of the file. Their scales of a few bytes often lie far
from codes, and a read for those of each unit took twice as long as all codes."""
_ON_HOST_BYTES = 1 << 14
"""Tensors up to this size are read to the host: shapes, global scales, the scales of FP8 blocks.
Those of all experts go to the device together."""


class LayerReader:
    """Reads from one checkpoint to one device, through one buffer.

    In addition to the tensors the host holds that buffer (none for a CPU) and, of formats that
    are decoded, a few experts.

    Args:
        converted: where the weights are.
        device: where they shall be.
        prepared: read layers from this folder of its instead.
    """

    def __init__(
        self,
        converted: ConvertedCheckpoint,
        device: torch.device,
        *,
        prepared: PreparedCheckpoint | None = None,
    ) -> None:
        self.converted = converted
        self.device = device
        self.staging = Staging(device)
        self._prepared = prepared

    def load(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        backend: str | None = None,
        activations: ActivationsChoice = "format",
    ) -> PackedExperts:
        """The experts `experts`, at least one, of a layer that holds experts, in this order.

        Those of a prepared folder are copied as they are in the file, and packed again only for a
        backend that reads another layout; others are packed on the device.

        Backend and activations are chosen as for `FusedExperts`.

        Raises:
            CheckpointError: as `read`; or a prepared layer is stale.
            UnsupportedError: as `read`; or no backend runs the experts on the device.
        """
        self._check(layer, experts, backend, activations)
        if self._prepared is None:
            weights = self.read(layer, experts)
            if self._takes_input_scales(layer, activations):
                scales = self.converted.read_input_scales(layer, experts)
                there = {name: scale.to(self.device) for name, scale in scales.items()}
                weights = weights.with_input_scales(there)
            return pack_experts(weights, backend=backend, activations=activations)
        ((_, packed),) = self._load_prepared([(layer, activations)], experts, backend)
        return packed

    def load_each(
        self,
        layers: Iterable[int],
        experts: Sequence[int],
        *,
        backend: str | None = None,
        activations: ActivationsChoice = "format",
    ) -> Iterator[tuple[int, PackedExperts]]:
        """As `load` for one layer after another, with activations by `choose_activations`.

        That a backend runs each of them is known before the first is read.
        Of a prepared folder the next layer is on its way while one is completed; memory on the
        device is taken for both.
        """
        check_activations(activations)
        chosen = [(layer, self.choose_activations(layer, activations)) for layer in layers]
        for layer, wanted in chosen:
            self._check(layer, experts, backend, wanted)
        if self._prepared is not None:
            yield from self._load_prepared(chosen, experts, backend)
            return
        for layer, wanted in chosen:
            yield layer, self.load(layer, experts, backend=backend, activations=wanted)

    def _check(
        self,
        layer: int,
        experts: Sequence[int],
        backend: str | None,
        activations: ActivationsChoice,
    ) -> None:
        """Refuse a layer that no backend runs, by what config.json and headers say of it.

        Backend and activations are those that `load` will choose, before it reads any weight.
        """
        check_activations(activations)
        if self._prepared is not None:
            format = self._prepared.entry(layer).format
            if self.converted.format_of_experts(layer) != format:
                return  # stale, which opening it says
        else:
            module = partial(self.converted.expert_module, layer, experts[0])
            format = self.converted.encoded(module(self.converted.moe.projections[0])).format
        check_runnable(format)
        static = self._takes_input_scales(layer, activations)
        scheme = scheme_of(format, activations, static=static)
        bias = self.converted.has_biases
        workload = self._workload(layer, format, scheme, experts=len(experts), bias=bias)
        select(workload, backend)

    def _workload(
        self, layer: int, format: str, scheme: str, *, experts: int, bias: bool
    ) -> Workload:
        """What a backend is asked to run: so many experts of a layer."""
        moe = self.converted.moe
        return Workload(
            format=format,
            activations=scheme,
            experts=experts,
            hidden=moe.hidden,
            intermediate=moe.intermediate,
            device=self.device,
            act_fn=computed_act_fn(self.converted, layer),
            bias=bias,
        )

    def choose_activations(self, layer: int, activations: ActivationsChoice) -> ActivationsChoice:
        """What "format" stands for, where config.json says more than the format; else as given.

        A static global scale comes with the weights, and needs no choice.

        Raises:
            UnsupportedError: the layer's experts differ in it.
        """
        if activations == "format":
            stated = self.converted.activations_of_experts(layer)
            return MXFP4 if stated == MXFP4 else activations
        return activations

    def _takes_input_scales(self, layer: int, activations: str) -> bool:
        """Whether static scales belong to a layer: where config.json and caller want them."""
        wanted = _STATIC_OF.get(activations)
        return wanted is not None and self.converted.activations_of_experts(layer) in wanted

    def _prepared_input_scales(
        self, layer: int, experts: Sequence[int], file: LayerFile
    ) -> dict[str, Tensor]:
        """Static scales by field of `ExpertWeights`, on the host.

        The file of a layer that was prepared for other activations has none: those of the portable
        files are read.
        """
        if not file.tensors.keys() >= {*INPUT_SCALES}:
            return self.converted.read_input_scales(layer, experts)
        return input_scales_in({name: file.read(name)[list(experts)] for name in INPUT_SCALES})

    def _load_prepared(
        self,
        layers: Iterable[tuple[int, ActivationsChoice]],
        experts: Sequence[int],
        backend: str | None,
    ) -> Iterator[tuple[int, PackedExperts]]:
        """Layers of the prepared folder, each with its activations."""

        def reads() -> Iterator[Read]:
            for layer, activations in layers:
                yield from self._begin(layer, experts, backend, activations).reads(experts)

        with closing(self.staging.stream(reads())) as stream:
            for read in stream:
                if isinstance(read.what, _PreparedLayer):
                    yield read.what.layer, read.what.complete()

    def _begin(
        self,
        layer: int,
        experts: Sequence[int],
        backend: str | None,
        activations: ActivationsChoice,
    ) -> _PreparedLayer:
        """Room for a layer of the prepared folder, and what shall become of it."""
        assert self._prepared is not None
        file, layout, format = self._prepared.open_layer(layer)
        static = self._takes_input_scales(layer, activations)
        scales = self._prepared_input_scales(layer, experts, file) if static else {}
        scheme = scheme_of(format, activations, static=static)
        bias = "w2_bias" in file.tensors
        workload = self._workload(layer, format, scheme, experts=len(experts), bias=bias)
        chosen = select(workload, backend)
        if layout not in chosen.layouts:
            self._warn_of_packing_again(layer, layout, workload, chosen, backend)
        # On the host: on the device this would wait for all that was queued before.
        check_input_scales(scales, format)
        tensors = self._room_for(file, len(experts), static=static)
        portable_scales = {
            name: scale.to(self.device)
            for name, scale in name_input_scales(scales).items()
            if name not in tensors
        }
        return _PreparedLayer(
            layer=layer,
            file=file,
            layout=layout,
            workload=workload,
            backend=chosen,
            tensors=tensors,
            portable_scales=portable_scales,
        )

    def _warn_of_packing_again(
        self,
        layer: int,
        layout: Layout,
        workload: Workload,
        chosen: Backend,
        backend: str | None,
    ) -> None:
        """Warn where the activations that a layer was prepared for would not have it packed again.

        They are not taken unasked: results would be others.
        """
        assert self._prepared is not None
        wanted, found = self._prepared.entry(layer).activations, workload.activations
        if wanted == found:
            return
        try:
            select(replace(workload, activations=wanted), backend, layout=layout)
        except UnsupportedError:
            return
        warnings.warn(
            f"{self._prepared.folder}: prepared for activations {wanted}, but loaded with {found}, "
            f"so that weights are unpacked and packed again for {chosen.name}, which takes longer; "
            f'load with activations="{choice_of(wanted)}", or prepare with --activations '
            f"{choice_of(found)}",
            SlowPathWarning,
            stacklevel=2,
        )

    def _room_for(self, file: LayerFile, experts: int, *, static: bool) -> dict[str, Tensor]:
        """Tensors for so many experts of a file; for static scales only if they are wanted."""
        # Tensors of that mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            return {
                name: torch.empty(
                    (experts, *info.shape[1:]), dtype=DTYPES[info.dtype], device=self.device
                )
                for name, info in file.tensors.items()
                if static or name not in INPUT_SCALES
            }

    def read(self, layer: int, experts: Sequence[int]) -> ExpertWeights:
        """The weights of `experts`, at least one, of a layer of the converted checkpoint.

        Raises:
            CheckpointError: a tensor is missing, damaged or not of the shape config.json says.
            UnsupportedError: the layer was not converted, its weights are in several formats, or
                the function between its GEMMs is not one we compute.
        """
        act_fn = computed_act_fn(self.converted, layer)
        # Tensors of that mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            weights = self._read_experts(layer, experts, act_fn)
            biases = {
                f"{projection}_bias": bias[list(experts)].to(self.device)
                for projection, bias in (self.converted.read_biases(layer) or {}).items()
            }
        return ExpertWeights.of(weights, act_fn, **biases)

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as they are on disk, on the device; errors as `Checkpoint.read`."""
        locate = self.converted.checkpoint.locate
        for unit in self._arrivals(_Unit(weights={}, ranges={n: locate(n)}) for n in names):
            for name, tensor in unit.tensors.items():
                yield name, tensor.to(self.device)

    def read_modules(self, modules: Iterable[str]) -> Iterator[tuple[str, QuantizedWeight]]:
        """Converted weights by module, on the device; errors as `ConvertedCheckpoint.read`."""
        units = (self._unit({module: module}) for module in modules)
        for unit in self._arrivals(units):
            for module, q in unit.decode().items():
                yield module, q.to(self.device)

    def _read_experts(
        self, layer: int, experts: Sequence[int], act_fn: ActFn
    ) -> dict[str, QuantizedWeight]:
        """The weights of all `experts` by projection."""
        converted = self.converted

        def expert(row: int) -> _Unit:
            module = partial(converted.expert_module, layer, experts[row])
            return self._unit({p: module(p) for p in converted.moe.projections}, row=row)

        def decode(unit: _Unit) -> dict[str, QuantizedWeight]:
            weights = unit.decode()
            for projection, q in weights.items():
                converted.check_expert(q, layer, experts[unit.row], projection)
            return weights

        # The first alone: it shows what is decoded, and to what.
        (first,) = self._arrivals([expert(0)])
        like = decode(first)
        tensors = room(like, len(experts))
        shape = (len(experts), *like["up"].shape)
        format = like["up"].format
        places = projections(tensors, format=format, shape=shape, gated=act_fn.gated)
        kept = {p: _kept_as_read(q, first.tensors) for p, q in like.items()}

        def placed(row: int) -> _Unit:
            unit = expert(row)
            unit.places = {
                key: places[projection].tensors()[part][row].view(dtype)
                for projection, keys in kept.items()
                for key, (part, dtype) in keys.items()
            }
            return unit

        for unit in chain([first], self._arrivals(map(placed, range(1, len(experts))))):
            for projection, q in (like if unit is first else decode(unit)).items():
                name = f"layer {layer}, {projection} of expert {experts[unit.row]}"
                _put(places[projection], unit.row, q, name)
        there = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        return projections(there, format=format, shape=shape, gated=act_fn.gated)

    def _unit(self, modules: Mapping[str, str], *, row: int = 0) -> _Unit:
        weights = {key: self.converted.encoded(module) for key, module in modules.items()}
        ranges = {
            _key(key, weight, name): where
            for key, weight in weights.items()
            for name, where in weight.locate(self.converted.checkpoint).items()
        }
        return _Unit(weights=weights, ranges=ranges, row=row)

    def _arrivals(self, units: Iterable[_Unit]) -> Iterator[_Unit]:
        """Each unit once its tensors are there, or on their way; perhaps in another order."""

        def reads() -> Iterator[Read]:
            for some in _groups(units, _READ_TOGETHER):
                ranges = [(u, key, where) for u in some for key, where in u.ranges.items()]
                ranges.sort(key=lambda item: (item[2].info.file, item[2].info.start))
                for unit, key, where in ranges:
                    unit.tensors[key] = self._target(where, unit.places.get(key))
                    last = len(unit.tensors) == len(unit.ranges)
                    yield Read(
                        file=where.file,
                        start=where.info.start,
                        target=unit.tensors[key],
                        what=unit if last else None,
                    )

        with closing(self.staging.stream(reads())) as stream:
            for read in stream:
                if isinstance(read.what, _Unit):
                    yield read.what

    def _target(self, where: TensorRange, place: Tensor | None) -> Tensor:
        dtype = DTYPES[where.info.dtype]
        if place is not None and (place.dtype, place.shape) == (dtype, where.info.shape):
            return place
        on_host = where.info.size_bytes <= _ON_HOST_BYTES
        device = torch.device("cpu") if on_host else self.device
        return torch.empty(where.info.shape, dtype=dtype, device=device)


def computed_act_fn(converted: ConvertedCheckpoint, layer: int) -> ActFn:
    """The function between the GEMMs of a layer's experts.

    Raises:
        UnsupportedError: it is not one we compute.
    """
    found = converted.moe.act_fn_of(layer)
    try:
        found.check()
    except UnsupportedError as error:
        raise UnsupportedError(f"{converted.checkpoint.path / 'config.json'}: {error}") from error
    return found


@dataclass(frozen=True, kw_only=True)
class _PreparedLayer:
    """A layer of a prepared folder on its way to the device.

    Attributes:
        layer: its index.
        file: where it is.
        layout: of its tensors.
        workload: of the layer.
        backend: what shall run it.
        tensors: those of the file that are wanted, by name, to be filled.
        portable_scales: static scales of activations by name, if the file does not have them.
    """

    layer: int
    file: LayerFile
    layout: Layout
    workload: Workload
    backend: Backend
    tensors: Mapping[str, Tensor]
    portable_scales: Mapping[str, Tensor]

    def reads(self, experts: Sequence[int]) -> Iterator[Read]:
        """What fills the tensors, in the order of the file; the last one has this as `what`."""
        reads = []
        for name in sorted(self.tensors, key=lambda name: self.file.tensors[name].start):
            info, target = self.file.tensors[name], self.tensors[name]
            if list(experts) == list(range(info.shape[0])):
                reads.append((info.start, target))
                continue
            for row, expert in enumerate(experts):
                reads.append((self.file.expert(name, expert).start, target[row]))
        for start, target in reads[:-1]:
            yield Read(file=self.file.file, start=start, target=target)
        start, target = reads[-1]
        yield Read(file=self.file.file, start=start, target=target, what=self)

    def complete(self) -> PackedExperts:
        """The experts, once tensors are filled; packed again for a backend of another layout."""
        with torch.inference_mode(mode=False):
            tensors = {**self.tensors, **self.portable_scales}
            if self.layout not in self.backend.layouts:
                tensors = self.backend.pack(self.layout.unpack(tensors, self.workload))
            return self.backend.load(tensors, self.workload)


@dataclass(kw_only=True)
class _Unit:
    """Tensors that are read together, and the weights that they are decoded to.

    Attributes:
        weights: the weights; none if tensors are read as they are.
        ranges: what is read, by keys that are the same for all experts of a layer.
        row: place of an expert among those that are read.
        places: tensors that are there already and shall be filled, by key.
        tensors: what was read, by key.
    """

    weights: Mapping[str, EncodedWeight]
    ranges: Mapping[str, TensorRange]
    row: int = 0
    places: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def decode(self) -> dict[str, QuantizedWeight]:
        """The weights, of what was read; errors as `EncodedWeight.decode`."""
        read = self.tensors
        return {
            key: weight.decode(weight.pick({n: read[_key(key, weight, n)] for n in weight.places}))
            for key, weight in self.weights.items()
        }


def _groups(units: Iterable[_Unit], size: int) -> Iterator[list[_Unit]]:
    """The units, up to `size` at a time."""
    left = iter(units)
    while some := list(islice(left, size)):
        yield some


def _key(key: str, weight: EncodedWeight, name: str) -> str:
    """What a range is called: weights that share a tensor share its name."""
    place = weight.places[name]
    return key + name.removeprefix(weight.module) if place.expert is None else place.tensor


def _put(weights: QuantizedWeight, row: int, q: QuantizedWeight, name: str) -> None:
    """Make `q`, which errors call `name`, the weight of expert `row`.

    Raises:
        UnsupportedError: its format or shape is not that of the others.
    """
    if q.format != weights.format or q.shape != weights.shape[1:]:
        raise UnsupportedError(
            f"{name} is {q.format} {list(q.shape)}, but another expert is {weights.format} "
            f"{list(weights.shape[1:])}; convert them by one rule"
        )
    for part, tensor in q.tensors().items():
        place = weights.tensors()[part][row]
        if tensor.data_ptr() != place.data_ptr():
            place.copy_(tensor)


def _kept_as_read(
    q: QuantizedWeight, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[str, torch.dtype]]:
    """Keys of tensors that decoding left where they were; which part each is, and its dtype."""
    return {
        key: (part, tensor.dtype)
        for key, tensor in tensors.items()
        for part, decoded in q.tensors().items()
        if decoded.data_ptr() == tensor.data_ptr() and decoded.shape == tensor.shape
    }
