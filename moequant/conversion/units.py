"""The items of work: units of weights that are converted together, and tensors to copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from moequant.conversion.rounding import quantizer_options
from moequant.errors import UnsupportedError
from moequant.formats import get_format
from moequant.formats.base import SOURCE_DTYPES
from moequant.storage.headers import DTYPES
from moequant.weights.encoded import EncodedInfo
from moequant.weights.row_tiles import split_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moequant.conversion.predicted_inputs import PredictedInputs
    from moequant.conversion.rounding import GptqRounding
    from moequant.conversion.stack import Stack
    from moequant.dialects.base import Dialect
    from moequant.quantizers import Job
    from moequant.storage.headers import TensorInfo
    from moequant.weights.source_weights import WeightInfo


_SCALE_BYTES = 4
"""Of a static scale of activations."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight of the source that will be converted.

    Attributes:
        info: how it is stored.
        role: its role in the architecture table.
        expert: layer, expert and projection, by which statistics are found; None if it is not a
            routed expert's.
    """

    info: WeightInfo
    role: str
    expert: tuple[int, int, str] | None = None

    @property
    def module(self) -> str:
        """Its name without `.weight`."""
        return self.info.name.removesuffix(".weight")

    @property
    def stored_format(self) -> str | None:
        """The format it is stored in; None if it is plain."""
        return self.info.format if isinstance(self.info, EncodedInfo) else None

    @property
    def decoded_bytes(self) -> int:
        """Size of the decoded weight; 0 if it is plain."""
        N, K = self.info.shape
        return N * K * DTYPES[self.info.dtype].itemsize if self.stored_format else 0

    def check_dtype(self) -> None:
        """Check that a plain weight is BF16, FP16 or FP32; raises UnsupportedError."""
        if DTYPES.get(self.info.dtype) not in SOURCE_DTYPES:
            raise UnsupportedError(
                f"{self.info.name}: stored as {self.info.dtype}, but must be BF16, F16 or F32; use "
                "the unquantized release of this model"
            )


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Weights that are converted together: a fused set, or a single weight.

    An expert's gate and up are one unit, its down another.

    Attributes:
        weights: in natural order of names.
        format: name of the format to convert to.
        options: every option of the format with its value.
        rounding: how GPTQ rounds; None if codes are the nearest.
        stack: the stack to write to; None for separate tensors.
        lossless: whether quantized weights are requantized without loss where possible; options
            then do not apply.
        activation_scales: the static scale of the weights' input, which they share, or
            "statistics"; None without.
        predicted: how the mean squares of its input are predicted; None if they are not.
    """

    weights: tuple[Weight, ...]
    format: str
    options: Mapping[str, str]
    rounding: GptqRounding | None = None
    stack: Stack | None = None
    lossless: bool = True
    activation_scales: str | float | None = None
    predicted: PredictedInputs | None = None

    @property
    def is_static(self) -> bool:
        """Whether its input has a static scale."""
        return self.activation_scales is not None

    @property
    def name(self) -> str:
        """Name of its first weight."""
        return self.weights[0].info.name

    @property
    def is_plain(self) -> bool:
        """Whether the unit is dequantized, not quantized."""
        return get_format(self.format).is_plain

    @property
    def source_bytes(self) -> int:
        """Bytes read."""
        return sum(weight.info.size_bytes for weight in self.weights)

    @cached_property
    def tiles(self) -> tuple[Unit, ...]:
        """Units of some rows each, to be converted one after the other; itself if it is small.

        Only a weight that is dequantized into a separate tensor is split.
        """
        info = self.weights[0].info
        if not self.is_plain or self.stack is not None or not isinstance(info, EncodedInfo):
            return (self,)
        tiles = split_rows(info)
        if len(tiles) == 1:
            return (self,)
        return tuple(
            replace(self, weights=(replace(self.weights[0], info=tile),)) for tile in tiles
        )

    def first_tensor(self, dialect: Dialect) -> str:
        """Name of its first output tensor, or of its part of a stack."""
        suffix = dialect.encoding(self.format).suffixes[0]
        return self.stack.piece(suffix) if self.stack else f"{self.weights[0].module}.{suffix}"

    @property
    def result_bytes(self) -> int:
        """What its weights, or those of one tile, take in their format."""
        if self.is_plain and len(self.tiles) > 1:
            return self.tiles[0].result_bytes
        scales = _SCALE_BYTES * len(self.weights) if self.is_static else 0
        return scales + sum(_quantized_bytes(self.format, w.info.shape) for w in self.weights)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A tensor that is copied bit for bit.

    Attributes:
        info: its header entry.
        is_bias: whether it has biases of converted experts, and must not have NaN or Inf.
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


Item = Unit | Copy
"""A piece of work."""


@lru_cache(maxsize=1 << 10)
def _quantized_bytes(format: str, shape: tuple[int, int]) -> int:
    """Size of a weight [N, K]; cached, because the weights of a model have few shapes."""
    wanted = get_format(format)
    specs = wanted.specs(shape)
    return (
        specs["qdata"].size_bytes if wanted.is_plain else sum(s.size_bytes for s in specs.values())
    )


def quantizer_jobs(items: Iterable[Item]) -> list[Job]:
    """The distinct jobs for a quantizer, of items without refusals."""
    kinds = {
        (
            item.format,
            tuple(sorted(quantizer_options(item.options).items())),
            weight.stored_format,
            weight.info.dtype,
        )
        for item in items
        if not isinstance(item, Copy)
        for weight in item.weights
    }
    return [
        (get_format(name), dict(options), stored or DTYPES[dtype])
        for name, options, stored, dtype in sorted(kinds, key=str)
    ]
