"""The pieces of work: weights that are converted together, and tensors that come along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moequant.checkpoint.headers import DTYPES
from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.formats.base import SOURCE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from moequant.checkpoint.headers import TensorInfo
    from moequant.checkpoint.source import Checkpoint
    from moequant.dialects.base import Dialect


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight of the source that will be converted."""

    info: TensorInfo
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
class Unit:
    """The smallest piece of work: weights that engines fuse, converted together.

    An expert's gate and up are one unit, its down another.

    Attributes:
        weights: in natural order of names.
        format: name of the format they get.
        options: every option of it with its value.
    """

    weights: tuple[Weight, ...]
    format: str
    options: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its first tensor's name."""
        return self.weights[0].info.name

    @property
    def source_bytes(self) -> int:
        """Bytes read."""
        return sum(weight.info.size_bytes for weight in self.weights)

    @property
    def working_bytes(self) -> int:
        """Upper bound of the memory converting this unit takes."""
        format = get_format(self.format)
        shapes = [weight.info.shape for weight in self.weights]
        results = sum(s.size_bytes for shape in shapes for s in format.specs(shape).values())
        # Results exist twice, while tiles are joined and while codes are put in disk form.
        workspace = max(format.workspace_bytes(shape) for shape in shapes)
        return self.source_bytes + 2 * results + workspace


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


def convert_unit(source: Checkpoint, unit: Unit, dialect: Dialect) -> dict[str, Tensor]:
    """Read and quantize a unit: its tensors as they go to disk, by name.

    Raises:
        NonFiniteError: a weight holds NaN or Inf.
        CheckpointError: the source cannot be read.
    """
    return quantize_unit([source.read(w.info.name) for w in unit.weights], unit, dialect)


def quantize_unit(weights: Sequence[Tensor], unit: Unit, dialect: Dialect) -> dict[str, Tensor]:
    """The tensors of a unit as they go to disk, from its weights in their order.

    Raises:
        NonFiniteError: a weight holds NaN or Inf.
    """
    names = [weight.info.name for weight in unit.weights]
    quantized = get_format(unit.format).quantize_fused(weights, unit.options, names=names)
    tensors: dict[str, Tensor] = {}
    for weight, q in zip(unit.weights, quantized, strict=True):
        tensors.update(dialect.to_disk(weight.module, q))
    return tensors
