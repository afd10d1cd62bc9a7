"""The pieces of work: weights that are converted together, and tensors that come along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moequant.checkpoint.buffers import Arena
from moequant.checkpoint.headers import DTYPES
from moequant.checkpoint.parts import PartInfo, read_weights
from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.formats.base import SOURCE_DTYPES
from moequant.quantizers.tiles import TorchQuantizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.checkpoint.headers import TensorInfo
    from moequant.checkpoint.parts import WeightInfo
    from moequant.checkpoint.source import Checkpoint
    from moequant.dialects.base import Dialect
    from moequant.quantizers import Quantizer


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight of the source that will be converted."""

    info: WeightInfo
    role: str

    @property
    def module(self) -> str:
        """Its name without `.weight`."""
        return self.info.name.removesuffix(".weight")

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
    """Where a unit goes in a dialect that stacks the experts of a layer.

    Attributes:
        tensor: name of what holds them, without the dialect's suffixes.
        expert: which of them this is.
        experts: how many there are.
        interleaved: whether the rows of gate and up take turns.
    """

    tensor: str
    expert: int
    experts: int
    interleaved: bool

    def name(self, suffix: str) -> str:
        """Name of the tensor on disk that holds parts called `suffix`."""
        return f"{self.tensor}_{suffix}"

    def piece(self, suffix: str) -> str:
        """What this expert's part of that tensor is called while it is written."""
        return f"{self.name(suffix)}[{self.expert}]"

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Gate's and up's parts, or down's alone, as they lie in the stack."""
        if len(parts) == 1:
            return parts[0]
        if self.interleaved:
            return torch.stack([*parts], 1).flatten(0, 1)
        return torch.cat([*parts])


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest piece of work: weights that engines fuse, converted together.

    An expert's gate and up are one unit, its down another.

    Attributes:
        weights: in natural order of names.
        format: name of the format they get.
        options: every option of it with its value.
        stack: where its tensors go, if not into files on their own.
    """

    weights: tuple[Weight, ...]
    format: str
    options: Mapping[str, str]
    stack: Stack | None = None

    @property
    def name(self) -> str:
        """Its first tensor's name."""
        return self.weights[0].info.name

    @property
    def source_bytes(self) -> int:
        """Bytes read."""
        return sum(weight.info.size_bytes for weight in self.weights)

    @property
    def device_bytes(self) -> int:
        """Upper bound of the memory it takes on a GPU that quantizes it."""
        # Each tensor begins at a multiple of 64 bytes: weights, their parts and a check's result.
        return self.source_bytes + self._result_bytes + 64 * (1 + 4 * len(self.weights))

    @property
    def working_bytes(self) -> int:
        """Upper bound of the memory converting this unit takes."""
        format = get_format(self.format)
        workspace = max(format.workspace_bytes(weight.info.shape) for weight in self.weights)
        # An expert in a stack is read whole, and picked out before it is turned.
        copies = 3 if any(isinstance(weight.info, PartInfo) for weight in self.weights) else 1
        # Results exist twice, while tiles are joined and while codes are put in disk form.
        return copies * self.source_bytes + 2 * self._result_bytes + workspace

    @property
    def _result_bytes(self) -> int:
        format = get_format(self.format)
        specs = (format.specs(weight.info.shape) for weight in self.weights)
        return sum(spec.size_bytes for of_one in specs for spec in of_one.values())


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A tensor that comes along bit for bit."""

    info: TensorInfo

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.info.name

    @property
    def source_bytes(self) -> int:
        """Bytes read."""
        return self.info.size_bytes


def convert_unit(
    source: Checkpoint, unit: Unit, dialect: Dialect, quantizer: Quantizer, arena: Arena
) -> dict[str, Tensor]:
    """Read and quantize a unit: its tensors as they go to disk, by name.

    They may lie in the memory of `arena`, and are good until it is cleared.

    Raises:
        NonFiniteError: a weight holds NaN or Inf.
        CheckpointError: the source cannot be read.
    """
    weights = read_weights(source, [weight.info for weight in unit.weights], arena)
    tensors = quantize_unit(weights, unit, dialect, quantizer, arena)
    if unit.stack is None:
        return tensors
    return {
        unit.stack.piece(suffix): unit.stack.join(
            [tensors[f"{weight.module}.{suffix}"] for weight in unit.weights]
        )
        for suffix in dialect.suffixes[unit.format]
    }


def quantize_unit(
    weights: Sequence[Tensor],
    unit: Unit,
    dialect: Dialect,
    quantizer: Quantizer | None = None,
    arena: Arena | None = None,
) -> dict[str, Tensor]:
    """The tensors of a unit by the dialect's names for a single weight, in the weights' order.

    By `quantizer`, in the memory of `arena`; without them, by the reference functions in new
    memory.

    Raises:
        NonFiniteError: a weight holds NaN or Inf.
    """
    names = [weight.info.name for weight in unit.weights]
    quantized = (quantizer or TorchQuantizer()).quantize_fused(
        get_format(unit.format),
        weights,
        unit.options,
        names=names,
        empty=(arena or Arena()).empty,
    )
    tensors: dict[str, Tensor] = {}
    for weight, q in zip(unit.weights, quantized, strict=True):
        tensors.update(dialect.to_disk(weight.module, q))
    return tensors
