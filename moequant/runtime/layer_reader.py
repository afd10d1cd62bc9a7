"""Read the weights of expert layers from a checkpoint's files to a device.

Decisions, each with the failure it prevents:

* A layer's tensors are allocated once, on the device, and filled expert by expert. Otherwise
  stacking single experts would need a second copy of the layer.
* Bytes that are the same on disk and in memory are read straight to their destination. The first
  expert shows which they are, so that no dialect is special here.
* Other tensors are decoded on the device, because a CPU unpacks slower than it reads.
* Small tensors are decoded on the host, because decoding reads their values, which would
synchronize
  with the device thousands of times per model.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch

from moequant.errors import UnsupportedError
from moequant.runtime.backends import Workload
from moequant.runtime.backends.stacked import projections, room
from moequant.runtime.layer_source import PortableLayer
from moequant.runtime.packing import pack_experts, scheme_of
from moequant.runtime.select import select
from moequant.runtime.staging import Read, Staging
from moequant.runtime.weights import ExpertWeights
from moequant.storage.headers import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from moequant.act_fn import ActFn
    from moequant.formats import QuantizedWeight
    from moequant.runtime.backends import PackedExperts
    from moequant.runtime.prepared import LayerFile, PreparedCheckpoint
    from moequant.storage.checkpoint import TensorRange
    from moequant.weights.converted import ConvertedCheckpoint
    from moequant.weights.encoded import EncodedWeight

_ON_HOST_BYTES = 1 << 14
"""Tensors up to this size are read to the host: shapes, global scales, the scales of FP8 blocks.
Those of all experts go to the device together."""


class LayerReader:
    """Reads from one checkpoint to one device, through one buffer.

    Beside the tensors themselves the host holds that buffer (none for a CPU) and, of formats that
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
        activations: Literal["format", "none"] = "format",
    ) -> PackedExperts:
        """The experts `experts`, at least one, of a layer that holds experts, in this order.

        Those of a prepared folder are copied as they lie in the file, and packed anew only for a
        backend that reads another layout; others are packed on the device.

        Args:
            layer: index of the layer.
            experts: their ids.
            backend: name of a backend; by default the best that can run them there.
            activations: see `FusedExperts`.

        Raises:
            CheckpointError: as `read`; or a prepared layer is stale.
            UnsupportedError: as `read`; or no backend runs the experts on the device.
        """
        if self._prepared is None:
            weights = self.read(layer, experts)
            return pack_experts(weights, backend=backend, activations=activations)
        file, layout, format = self._prepared.open_layer(layer)
        moe = self.converted.moe
        workload = Workload(
            format=format,
            activations=scheme_of(format, activations, static=False),
            experts=len(experts),
            hidden=moe.hidden,
            intermediate=moe.intermediate,
            device=self.device,
            act_fn=act_fn_of(self.converted, layer),
            bias="w2_bias" in file.tensors,
        )
        chosen = select(workload, backend)
        with torch.inference_mode(mode=False):
            tensors = self._read_file(file, experts)
            if chosen.layout != layout:
                tensors = chosen.layout.pack(layout.unpack(tensors, workload))
            return chosen.load(tensors, workload)

    def _read_file(self, file: LayerFile, experts: Sequence[int]) -> dict[str, Tensor]:
        """The tensors of a prepared layer, for `experts`."""
        tensors = {
            name: torch.empty(
                (len(experts), *info.shape[1:]), dtype=DTYPES[info.dtype], device=self.device
            )
            for name, info in file.tensors.items()
        }

        def reads() -> Iterator[Read]:
            for name, info in sorted(file.tensors.items(), key=lambda item: item[1].start):
                if list(experts) == list(range(info.shape[0])):
                    yield Read(file=file.file, start=info.start, target=tensors[name])
                    continue
                for row, expert in enumerate(experts):
                    start = file.expert(name, expert).start
                    yield Read(file=file.file, start=start, target=tensors[name][row])

        for _ in self.staging.stream(reads()):
            pass
        return tensors

    def read(self, layer: int, experts: Sequence[int]) -> ExpertWeights:
        """The weights of `experts`, at least one, of a layer of the converted checkpoint.

        Raises:
            CheckpointError: a tensor is missing, damaged or not of the shape config.json says.
            UnsupportedError: the layer was not converted, its weights are in several formats, or
                the function between its GEMMs is not one we compute.
        """
        act_fn = act_fn_of(self.converted, layer)
        source = PortableLayer(converted=self.converted, layer=layer)
        # Tensors of that mode could not be written to outside of it.
        with torch.inference_mode(mode=False):
            weights = self._read_experts(source, experts, f"layer {layer}", act_fn)
            biases = {
                f"{projection}_bias": bias[list(experts)].to(self.device)
                for projection, bias in (self.converted.read_biases(layer) or {}).items()
            }
        return ExpertWeights.of(weights, act_fn, **biases)

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as they are on disk, on the device; errors as `Checkpoint.read`."""
        locate = self.converted.checkpoint.locate
        for unit in self._arrivals(_Unit(what=n, ranges={n: locate(n)}) for n in names):
            name = cast("str", unit.what)
            yield name, unit.tensors[name].to(self.device)

    def read_modules(self, modules: Iterable[str]) -> Iterator[tuple[str, QuantizedWeight]]:
        """Converted weights by module, on the device; errors as `ConvertedCheckpoint.read`."""
        checkpoint = self.converted.checkpoint
        weights = map(self.converted.encoded, modules)
        units = (_Unit(what=w, ranges=w.locate(checkpoint)) for w in weights)
        for unit in self._arrivals(units):
            weight = cast("EncodedWeight", unit.what)
            yield weight.module, weight.decode(weight.pick(unit.tensors)).to(self.device)

    def _read_experts(
        self, source: PortableLayer, experts: Sequence[int], name: str, act_fn: ActFn
    ) -> dict[str, QuantizedWeight]:
        """The weights of all `experts` by projection; errors call the layer `name`."""
        # The first alone: it shows what is decoded, and to what.
        (first,) = self._arrivals([_Unit(what=0, ranges=source.ranges(experts[0]))])
        names = self.converted.moe.projections
        like = dict(zip(names, source.decode(experts[0], first.tensors), strict=True))
        tensors = room(like, len(experts))
        I, H = like["up"].shape
        shape = (len(experts), I, H)
        format = like["up"].format
        places = projections(tensors, format=format, shape=shape, gated=act_fn.gated)
        kept = {p: _kept_as_read(q, first.tensors) for p, q in like.items()}

        def unit(row: int) -> _Unit:
            return _Unit(
                what=row,
                ranges=source.ranges(experts[row]),
                places={
                    key: places[projection].tensors()[part][row].view(dtype)
                    for projection, keys in kept.items()
                    for key, (part, dtype) in keys.items()
                },
            )

        for projection, q in like.items():
            _put(places[projection], 0, q, name)
        for arrived in self._arrivals(map(unit, range(1, len(experts)))):
            row = cast("int", arrived.what)
            weights = source.decode(experts[row], arrived.tensors)
            for projection, q in zip(names, weights, strict=True):
                what = f"{name}, {projection} of expert {experts[row]}"
                _put(places[projection], row, q, what)
        there = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        return projections(there, format=format, shape=shape, gated=act_fn.gated)

    def _arrivals(self, units: Iterable[_Unit]) -> Iterator[_Unit]:
        """Each unit once its tensors are there, or on their way."""

        def reads() -> Iterator[Read]:
            for unit in units:
                ranges = sorted(unit.ranges.items(), key=lambda item: _position(item[1]))
                for key, where in ranges:
                    unit.tensors[key] = self._target(where, unit.places.get(key))
                    last = len(unit.tensors) == len(ranges)
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


def act_fn_of(converted: ConvertedCheckpoint, layer: int) -> ActFn:
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


@dataclass(kw_only=True)
class _Unit:
    """What is decoded together.

    Attributes:
        what: for whoever asked.
        ranges: what is read for it, by a key.
        places: tensors that are there already and shall be filled, by key.
        tensors: what was read, by key.
    """

    what: object
    ranges: Mapping[str, TensorRange]
    places: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


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


def _position(where: TensorRange) -> tuple[str, int]:
    return where.info.file, where.info.start
