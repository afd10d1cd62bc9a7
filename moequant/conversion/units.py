"""The pieces of work: weights that are converted together, and tensors that come along.

A weight of the source may be quantized itself. What its format and the wanted one both hold is
written without a change of any number (`moequant.formats.recode`); all else is decoded to float32,
which rounds nothing but scales that are no powers of two, and quantized from that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from moequant.conversion.error_limit import check_underflow
from moequant.conversion.losses import Loss, measure, with_ratio
from moequant.errors import NonFiniteError, UnsupportedError
from moequant.formats import (
    QuantizedWeight,
    get_format,
    plain_weight,
    recode,
    tile_bytes,
)
from moequant.formats.base import SOURCE_DTYPES, check_values
from moequant.formats.squares import TILE_ROWS
from moequant.quantizers.tiles import TorchQuantizer
from moequant.storage.buffers import Arena
from moequant.storage.headers import DTYPES
from moequant.weights.encoded import EncodedInfo
from moequant.weights.parts import PartInfo, decoded, read_stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from moequant.dialects.base import Dialect
    from moequant.formats import StoredWeight
    from moequant.quantizers import Job, Quantizer
    from moequant.storage.checkpoint import Checkpoint
    from moequant.storage.headers import TensorInfo
    from moequant.weights.parts import WeightInfo


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight of the source that will be converted."""

    info: WeightInfo
    role: str

    @property
    def module(self) -> str:
        """Its name without `.weight`."""
        return self.info.name.removesuffix(".weight")

    @property
    def stored_format(self) -> str | None:
        """The format it is stored in; None where it is plain."""
        return self.info.format if isinstance(self.info, EncodedInfo) else None

    @property
    def decoded_bytes(self) -> int:
        """Bytes of what it is decoded to; 0 where it is plain."""
        N, K = self.info.shape
        return N * K * DTYPES[self.info.dtype].itemsize if self.stored_format else 0

    def check_dtype(self) -> None:
        """Refuse a source that is not plain floating point.

        Raises:
            UnsupportedError: names the weight and its dtype.
        """
        if DTYPES.get(self.info.dtype) not in SOURCE_DTYPES:
            raise UnsupportedError(
                f"{self.info.name}: stored as {self.info.dtype}, but conversion starts from BF16, "
                "F16 or F32; take the unquantized release of this model"
            )


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Where weights go that are written into tensors with all experts of a layer.

    Attributes:
        tensor: name of what holds them, without the dialect's suffixes.
        expert: which of them this is.
        experts: how many there are.
        interleaved: whether the rows of gate and up take turns.
        transposed: whether [K, N] lies there.
        flat: whether experts lie one below the other, with no dimension of their own.
    """

    tensor: str
    expert: int
    experts: int
    interleaved: bool
    transposed: bool = False
    flat: bool = False

    def name(self, suffix: str) -> str:
        """Name of the tensor on disk that holds parts called `suffix`; plain weights alone."""
        return self.tensor if suffix == "weight" else f"{self.tensor}_{suffix}"

    def piece(self, suffix: str) -> str:
        """What this expert's part of that tensor is called while it is written."""
        return f"{self.name(suffix)}[{self.expert}]"

    def shape(self, of_one: tuple[int, ...]) -> tuple[int, ...]:
        """Of a tensor that holds as much of every expert, each `of_one`."""
        if self.flat:
            return (self.experts * of_one[0], *of_one[1:])
        return (self.experts, *of_one)

    def joined_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Of what `join` makes of parts of these shapes."""
        rows, *rest = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return (*reversed(rest), rows) if self.transposed else (rows, *rest)

    def shape_of_one(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What of such a tensor one expert has."""
        return (shape[0] // self.experts, *shape[1:]) if self.flat else shape[1:]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Gate's and up's parts, or down's alone, as they lie in the stack."""
        if len(parts) == 1:
            joined = parts[0]
        elif self.interleaved:
            joined = torch.stack([*parts], 1).flatten(0, 1)
        else:
            joined = torch.cat([*parts])
        return joined.T.contiguous() if self.transposed else joined


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest piece of work: weights that engines fuse, converted together.

    An expert's gate and up are one unit, its down another.

    Attributes:
        weights: in natural order of names.
        format: name of the format they get.
        options: every option of it with its value.
        stack: where its tensors go, if not into files on their own.
        recode: whether weights stored in a quantized form are written without a change of any
            number where that can be; options then have no part in it.
    """

    weights: tuple[Weight, ...]
    format: str
    options: Mapping[str, str]
    stack: Stack | None = None
    recode: bool = True

    @property
    def name(self) -> str:
        """Its first tensor's name."""
        return self.weights[0].info.name

    @property
    def is_plain(self) -> bool:
        """Whether quantized weights are dequantized, rather than weights quantized."""
        return get_format(self.format).is_plain

    @property
    def source_bytes(self) -> int:
        """Bytes read."""
        return sum(weight.info.size_bytes for weight in self.weights)

    def first_tensor(self, dialect: Dialect) -> str:
        """Name of the first tensor it makes, or of its part of one."""
        suffix = dialect.encoding(self.format).suffixes[0]
        return self.stack.piece(suffix) if self.stack else f"{self.weights[0].module}.{suffix}"

    @property
    def working_bytes(self) -> int:
        """Upper bound of the memory converting this unit takes beside its batch's results."""
        if self.is_plain:
            # In a stack, weights are joined and turned; float32 of a tile lies in between.
            return 3 * self.source_bytes + 2 * self.result_bytes + _decoding_bytes(self.weights)
        format = get_format(self.format)
        workspace = max(format.workspace_bytes(weight.info.shape) for weight in self.weights)
        # Results exist once more while tiles are joined and while codes are put in disk form.
        return _reading_bytes(self.weights) + self.result_bytes + workspace

    @property
    def result_bytes(self) -> int:
        """What its weights take in their format."""
        return sum(_quantized_bytes(self.format, weight.info.shape) for weight in self.weights)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A tensor that comes along bit for bit.

    Attributes:
        info: what its header says.
        is_bias: whether it holds biases of experts that are converted, and so no NaN nor Inf.
    """

    info: TensorInfo
    is_bias: bool = False

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.info.name

    @property
    def source_bytes(self) -> int:
        """Bytes read."""
        return self.info.size_bytes


@lru_cache(maxsize=1 << 10)
def _quantized_bytes(format: str, shape: tuple[int, int]) -> int:
    """Of a weight [N, K]; kept, for nearly all weights of a model have the same few shapes."""
    wanted = get_format(format)
    specs = wanted.specs(shape)
    return (
        specs["qdata"].size_bytes if wanted.is_plain else sum(s.size_bytes for s in specs.values())
    )


def check_bias(source: Checkpoint, info: TensorInfo) -> None:
    """Refuse NaN and Inf in the biases of experts that are converted; they are small, and read.

    Raises:
        NonFiniteError: names the tensor, the index and the value of the first one found.
        CheckpointError: the source cannot be read.
        UnsupportedError: as `Checkpoint.read`.
    """
    values = source.read(info.name)
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        index = bad[0].tolist()
        raise NonFiniteError(
            f"{info.name}: {values[tuple(index)].item()} at index {index}; experts that are "
            "converted have biases without it. Mend the source checkpoint or fetch it again"
        )


Item = Unit | Copy
"""A piece of work."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What became of a unit.

    Attributes:
        tensors: as they go to disk, by name; good until the memory they lie in is cleared.
        losses: what was lost of weights that were stored in a quantized form.
        as_stored: whether some may lie where they were read.
        joined: whether they were joined, in memory that nobody counts.
    """

    tensors: dict[str, Tensor]
    losses: list[Loss]
    as_stored: bool = False
    joined: bool = False


def _reading_bytes(weights: Sequence[Weight]) -> int:
    """Upper bound of what weights take while they are read and brought into plain form."""
    source = sum(weight.info.size_bytes for weight in weights)
    # An expert in a stack is read whole, and picked out before it is turned.
    copies = 3 if any(not _stands_alone(weight.info) for weight in weights) else 1
    numbers = sum(weight.decoded_bytes for weight in weights)
    return copies * source + numbers + (_decoding_bytes(weights) if numbers else 0)


def _decoding_bytes(weights: Sequence[Weight]) -> int:
    """Upper bound of what lies in between while weights are decoded and compared."""
    return max(tile_bytes(weight.info.shape[1], TILE_ROWS) for weight in weights)


def _stands_alone(info: WeightInfo) -> bool:
    """Whether nothing else lies in its tensors."""
    if isinstance(info, EncodedInfo):
        return all(place.expert is None for place in info.places.values())
    return not isinstance(info, PartInfo)


def quantizer_jobs(items: Iterable[Item]) -> list[Job]:
    """What a quantizer will be asked for, each once; of items that none refuses."""
    kinds = {
        (item.format, tuple(sorted(item.options.items())), weight.stored_format, weight.info.dtype)
        for item in items
        if not isinstance(item, Copy)
        for weight in item.weights
    }
    return [
        (get_format(name), dict(options), stored or DTYPES[dtype])
        for name, options, stored, dtype in sorted(kinds, key=str)
    ]


def convert_unit(
    source: Checkpoint,
    unit: Unit,
    dialect: Dialect,
    quantizer: Quantizer,
    arena: Arena,
    results: Arena,
) -> Converted:
    """Read and quantize, or dequantize, a unit.

    What is read is in the memory of `arena`, results may lie in that of `results`.

    Raises:
        NonFiniteError: a weight holds NaN or Inf, or a number beyond the wanted format.
        NumericsError: the format destroys a weight; see `moequant.conversion.error_limit`.
        CheckpointError: the source cannot be read.
    """
    weights = read_stored(source, [weight.info for weight in unit.weights], arena)
    recoded = recode_unit(weights, unit)
    quantized = recoded or _quantize(weights, unit, quantizer, arena, results)
    if recoded is None and not unit.is_plain:
        names = [weight.info.name for weight in unit.weights]
        check_underflow(
            unit.format, names, weights=weights, quantized=quantized, quantizer=quantizer
        )
    losses = _losses(unit, weights, quantized, dialect, quantizer)
    tensors = encode_unit(quantized, unit, dialect)
    if unit.stack is None:
        return Converted(tensors=tensors, losses=losses, as_stored=recoded is not None)
    stacked = {
        unit.stack.piece(suffix): unit.stack.join(
            [tensors[f"{weight.module}.{suffix}"] for weight in unit.weights]
        )
        for suffix in dialect.encoding(unit.format).suffixes
    }
    return Converted(tensors=stacked, losses=losses, joined=True)


def recode_unit(weights: Sequence[StoredWeight], unit: Unit) -> list[QuantizedWeight] | None:
    """The weights of a unit in its format without a change of any number; None if there is no way.

    It does not look at what they hold: NaN stays NaN.
    """
    stored = [w for w in weights if isinstance(w, QuantizedWeight)]
    if not unit.recode or len(stored) < len(weights):
        return None
    return recode(stored, unit.format)


def quantize_unit(
    weights: Sequence[StoredWeight],
    unit: Unit,
    quantizer: Quantizer | None = None,
    arena: Arena | None = None,
    results: Arena | None = None,
) -> list[QuantizedWeight]:
    """The weights of a unit in its format, in order.

    By `quantizer`, in the memory of `results`, with that of `arena` for what lies in between;
    without them, by the reference functions in new memory.

    Raises:
        NonFiniteError: a weight holds NaN or Inf.
    """
    recoded = recode_unit(weights, unit)
    if recoded is not None:
        return recoded
    return _quantize(
        weights, unit, quantizer or TorchQuantizer(), arena or Arena(), results or Arena()
    )


def _quantize(
    weights: Sequence[StoredWeight],
    unit: Unit,
    quantizer: Quantizer,
    arena: Arena,
    results: Arena,
) -> list[QuantizedWeight]:
    format, names = get_format(unit.format), [weight.info.name for weight in unit.weights]
    if format.is_plain:
        return [
            plain_weight(quantizer.decode(q, format.qdata_dtype, name=name, empty=results.empty))
            for q, name in zip(weights, names, strict=True)
            if isinstance(q, QuantizedWeight)
        ]
    return quantizer.quantize_fused(
        format, weights, unit.options, names=names, empty=results.empty, scratch=arena.empty
    )


def encode_unit(
    quantized: Sequence[QuantizedWeight], unit: Unit, dialect: Dialect
) -> dict[str, Tensor]:
    """Tensors of a unit by the dialect's names for a single weight, in the weights' order.

    They take the memory of `quantized`, which is of no use afterwards.
    """
    tensors: dict[str, Tensor] = {}
    for weight, q in zip(unit.weights, quantized, strict=True):
        tensors.update(dialect.to_disk(weight.module, q, consume=True))
    return tensors


def source_ratio(weight: Weight, stored: QuantizedWeight) -> float:
    """As `Dialect.stored_ratio`, of a weight as its source's dialect reads it."""
    assert isinstance(weight.info, EncodedInfo), weight.info.name
    return weight.info.dialect.stored_ratio(stored)


def _losses(
    unit: Unit,
    stored: Sequence[StoredWeight],
    written: Sequence[QuantizedWeight],
    dialect: Dialect,
    quantizer: Quantizer,
) -> list[Loss]:
    """What became of the weights that were stored in a quantized form, once they are read again.

    Raises:
        NonFiniteError: one of them holds NaN or Inf.
    """
    losses = []
    for weight, before, q in zip(unit.weights, stored, written, strict=True):
        if not isinstance(before, QuantizedWeight):
            continue
        after = dialect.as_read(q)
        loss = measure(before, after, quantizer=quantizer, role=weight.role, format=unit.format)
        if not math.isfinite(loss.signal):
            check_values(decoded(before), weight.info.name)
        ratio = dialect.stored_ratio(after) / source_ratio(weight, before)
        losses.append(with_ratio(loss, ratio))
    return losses
