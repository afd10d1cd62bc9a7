"""What a format is: data about the numbers, and two pure functions.

Decision / failure it prevents:

* a format is named, never inferred from a dtype / a uint8 scale read as the wrong kind;
* in memory every scale multiplies, `w = decode(qdata) * scale * global_scale`; reciprocals exist
  inside dialects only / a checkpoint scaled by the square of its global scale;
* properties are class data and `specs` needs no tensor / a plan that must read weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from moequant.errors import CheckpointError, NonFiniteError, RecipeError, UnsupportedError
from moequant.formats.blocks import expand_blocks, grouped
from moequant.formats.elements import unpack_nibbles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moequant.formats.elements import Element

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

WHOLE = 1 << 30
"""Rows or columns of a block that spans the matrix."""

Use = Literal["convert", "dequantize", "read", "run"]
"""What can be done with a format.

* convert: a recipe names it, and weights of any source are quantized to it;
* dequantize: a recipe names it, and quantized weights of a source are written in it;
* read: the quantized weights of a source may be in it;
* run: `FusedExperts` takes weights in it.
"""

# A float32 tile of 1 MiB stays in the second-level cache with its few temporaries.
_TILE_ELEMENTS = 1 << 18
_TILE_COPIES = 24
"""Float32 copies of a tile that a format's temporaries may add up to."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor that need not exist yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes the tensor takes, in memory and on disk."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_text(self.dtype)} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight, or a batch of them, in a format: `w = decode(qdata) * scale * global_scale`.

    Attributes:
        format: name of the format, the only thing that says what the bytes mean.
        qdata: [..., N, storage_k(K)] codes; two 4-bit codes a byte, even column in the low nibble.
        scale: [..., ceil(N / block_n), ceil(K / block_k)] multiplier, in the format's scale dtype.
        global_scale: [...] float32 multiplier, or None where the format has none.
        shape: [..., N, K], logical.
    """

    format: str
    qdata: Tensor
    scale: Tensor
    global_scale: Tensor | None
    shape: torch.Size

    def tensors(self) -> dict[str, Tensor]:
        """The parts that hold data, by field name."""
        parts = {"qdata": self.qdata, "scale": self.scale}
        if self.global_scale is not None:
            parts["global_scale"] = self.global_scale
        return parts

    def map(
        self, fn: Callable[[Tensor], Tensor], shape: torch.Size | None = None
    ) -> QuantizedWeight:
        """The weight whose parts are `fn` of this one's; `shape` where that changes it."""
        return QuantizedWeight(
            format=self.format,
            qdata=fn(self.qdata),
            scale=fn(self.scale),
            global_scale=None if self.global_scale is None else fn(self.global_scale),
            shape=self.shape if shape is None else shape,
        )

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on `device`."""
        return self.map(lambda t: t.to(device))

    def __getitem__(self, index: int) -> QuantizedWeight:
        """Weight `index` of a batch, without a copy.

        Raises:
            IndexError: the weight has no leading dimension, or `index` lies outside it.
        """
        if len(self.shape) < 3:
            raise IndexError("a single weight has no leading dimension to index")
        return self.map(lambda t: t[index], shape=self.shape[1:])


StoredWeight = Tensor | QuantizedWeight
"""A weight [N, K] as a source holds it: plain numbers, or codes and scales."""


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack weights of one format and shape into a batch [len(weights), ...]; copies."""
    first = weights[0]
    if any(w.format != first.format or w.shape != first.shape for w in weights):
        raise UnsupportedError("cannot stack weights of different formats or shapes")
    parts = {k: torch.stack([w.tensors()[k] for w in weights]) for k in first.tensors()}
    return QuantizedWeight(
        format=first.format,
        qdata=parts["qdata"],
        scale=parts["scale"],
        global_scale=parts.get("global_scale"),
        shape=torch.Size((len(weights), *first.shape)),
    )


class Format:
    """What the numbers are; `moequant.formats` says what a new subclass needs besides its file.

    Subclasses state facts and implement `_quantize` on float32; the rest follows from the facts.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    uses: ClassVar[frozenset[Use]] = frozenset({"convert", "read", "run"})
    block: ClassVar[tuple[int, int]]
    """Rows and columns that share a scale."""
    ragged: ClassVar[bool] = False
    """Whether the last block of a row or column may be incomplete."""
    element: ClassVar[Element]
    """What a code is."""
    scale_dtype: ClassVar[torch.dtype]
    has_global_scale: ClassVar[bool] = False
    """Whether weights of one fused set (gate and up of an expert) share a FP32 scale."""
    activations: ClassVar[str]
    """What the format's GEMM is fed: "fp8_group128", "fp8_token" or "none" (weight only)."""
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Allowed values of each option, the default first."""
    ordinary_error: ClassVar[float] = 0.0
    """Most relative error, in the Frobenius norm, of Gaussian weights that are converted to it."""
    least_scale: ClassVar[float] = 0.0
    """Smallest scale that is as precise as larger ones and not held up by a lower limit."""

    reach: ClassVar[tuple[float, float] | None] = None
    """The lowest and the largest weight, in units of the scale, that some tool's rule for the scale
    lets occur, which then are clipped; None where those are the element's own."""

    @property
    def qdata_dtype(self) -> torch.dtype:
        """Of the codes."""
        return self.element.dtype

    @property
    def codes_per_byte(self) -> int:
        """2 where codes are of four bits, else 1."""
        return 2 if self.element.bits == 4 else 1

    @property
    def is_plain(self) -> bool:
        """Whether its codes are the numbers themselves, not quantized."""
        return self.element.dtype in SOURCE_DTYPES

    def block_of(self, q: QuantizedWeight) -> tuple[int, int]:
        """Rows and columns of a weight [..., N, K] that share a scale."""
        N, K = q.shape[-2:]
        block_n, block_k = self.block
        return min(block_n, max(N, 1)), min(block_k, max(K, 1))

    def underflows(self, q: QuantizedWeight) -> bool:
        """Whether a scale of a weight is below `least_scale`, so that small weights may be lost."""
        # Bits of positive floats have the order of the numbers, and integers are compared faster.
        bits = _BITS[q.scale.dtype.itemsize]
        least = int(q.scale.view(bits).min())
        return least < _bits_of(self.least_scale, q.scale.dtype, bits)

    def resolve_options(self, options: Mapping[str, str] | None = None) -> dict[str, str]:
        """All options with their values, defaults filled in.

        Raises:
            RecipeError: an option or a value the format does not have.
        """
        resolved = {key: values[0] for key, values in self.options.items()}
        for key, value in (options or {}).items():
            if key not in self.options:
                known = ", ".join(self.options) or "none"
                raise RecipeError(f"{self.name} has no option {key!r}; it has: {known}")
            if value not in self.options[key]:
                allowed = ", ".join(self.options[key])
                raise RecipeError(f"{self.name}: {key} = {value!r}, but it is one of: {allowed}")
            resolved[key] = value
        return resolved

    def check_shape(self, shape: Sequence[int], name: str = "weight") -> None:
        """Refuse a shape the format cannot hold.

        Raises:
            UnsupportedError: fewer than two dimensions, or K is not a multiple of the group.
        """
        fault = _fault(self, tuple(shape))
        if fault is not None:
            raise UnsupportedError(f"{name}: {fault}")

    def specs(self, shape: Sequence[int], name: str = "weight") -> Mapping[str, TensorSpec]:
        """What `quantize` makes of a weight of `shape`, by field of QuantizedWeight.

        Raises:
            UnsupportedError: as `check_shape`.
        """
        self.check_shape(shape, name)
        return _specs(self, tuple(shape))

    def quantize(
        self, w: Tensor, options: Mapping[str, str] | None = None, *, name: str = "weight"
    ) -> QuantizedWeight:
        """Quantize one weight, or a batch of them over the leading dimensions.

        Args:
            w: [..., N, K] bfloat16, float16 or float32.
            options: values of `self.options`; those left out take their default.
            name: what errors call the weight.

        Raises:
            UnsupportedError: a shape or dtype the format cannot take.
            NonFiniteError: `w` holds NaN or Inf; names index and value.
            RecipeError: an unknown option or value.
        """
        return self.quantize_fused([w], options, names=[name])[0]

    def quantize_fused(
        self,
        weights: Sequence[Tensor],
        options: Mapping[str, str] | None = None,
        *,
        names: Sequence[str],
    ) -> list[QuantizedWeight]:
        """Quantize weights that engines fuse, such as gate and up of one expert.

        They share one global scale where the format has one; otherwise this equals `quantize` of
        each. Arguments and errors as `quantize`, one name a weight and the same leading dimensions.
        """
        resolved = self.resolve_options(options)
        for w, name in zip(weights, names, strict=True):
            self.check_shape(w.shape, name)
            check_values(w, name)
        if len({w.shape[:-2] for w in weights}) > 1:
            shapes = ", ".join(str(list(w.shape)) for w in weights)
            raise UnsupportedError(
                f"{' and '.join(names)}: shapes {shapes}; a fused set has one batch of experts"
            )
        # A parameter's gradient ends here; contiguous parts come of contiguous weights only.
        weights = [w.detach() for w in weights]
        global_scale = self.global_scale(weights, resolved) if self.has_global_scale else None
        return [self._quantize_in_tiles(w, resolved, global_scale) for w in weights]

    def workspace_bytes(self, shape: Sequence[int]) -> int:
        """Upper bound of what `quantize` of one weight [N, K] allocates beside its result."""
        tile_bytes = self._tile_rows(shape[-1]) * shape[-1] * torch.float32.itemsize
        magnitudes = math.prod(shape) * torch.float32.itemsize  # of the check of the values
        return max(magnitudes, _TILE_COPIES * tile_bytes)

    def _tile_rows(self, K: int) -> int:
        """Rows worked on at a time: whole blocks, about _TILE_ELEMENTS elements."""
        block_n = self.block[0]
        return max(1, _TILE_ELEMENTS // (max(K, 1) * block_n)) * block_n

    def _quantize_in_tiles(
        self, w: Tensor, options: Mapping[str, str], global_scale: Tensor | None
    ) -> QuantizedWeight:
        """Quantize row tiles that fit in a cache and join them; rows do not depend on each other.

        Batches go whole: they come from callers on a GPU, where launches cost more than memory.
        """
        rows = self._tile_rows(w.shape[-1])
        if w.ndim > 2 or w.shape[-2] <= rows:
            return self._quantize(w.float().contiguous(), options, global_scale)
        tiles = [
            self._quantize(w[row : row + rows].float().contiguous(), options, global_scale)
            for row in range(0, len(w), rows)
        ]
        return QuantizedWeight(
            format=self.name,
            qdata=torch.cat([tile.qdata for tile in tiles]),
            scale=torch.cat([tile.scale for tile in tiles]),
            global_scale=global_scale,
            shape=w.shape,
        )

    def global_scale(self, weights: Sequence[Tensor], options: Mapping[str, str]) -> Tensor:
        """The [...] float32 scale a fused set shares; only the largest magnitudes count.

        Args:
            weights: [..., N, K] finite, with the same leading dimensions.
            options: every option with its value.
        """
        raise NotImplementedError(f"{self.name} has no global scale")

    def _quantize(
        self, w: Tensor, options: Mapping[str, str], global_scale: Tensor | None
    ) -> QuantizedWeight:
        """Quantize checked, contiguous [..., N, K] float32 with resolved options."""
        raise UnsupportedError(f"{self.name} is read-only; convert to another format")

    def dequantize(self, q: QuantizedWeight) -> Tensor:
        """Decode to [..., N, K] float32: code * scale, and * global scale if there is one.

        Exact where the scales are powers of two, or have so few bits that the product has 24.
        """
        codes = q.qdata if self.codes_per_byte == 1 else unpack_nibbles(q.qdata)
        numbers, scale, block = self.element.decode(codes), q.scale.float(), self.block_of(q)
        if scale.shape[-1] == 1 and (block[0] == 1 or scale.shape[-2] == 1):
            w = numbers * scale
        elif block[0] == 1 and q.shape[-1] % block[1] == 0:
            w = (grouped(numbers, block[1]) * scale.unsqueeze(-1)).reshape(q.shape)
        else:
            w = numbers * expand_blocks(scale, block, q.shape)
        return w if q.global_scale is None else w * q.global_scale[..., None, None]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@cache
def _bits_of(number: float, dtype: torch.dtype, bits: torch.dtype) -> int:
    return int(torch.tensor(number).to(dtype).view(bits).item())


# The weights of a model have a handful of shapes.
@lru_cache(maxsize=1 << 10)
def _fault(format: Format, shape: tuple[int, ...]) -> str | None:
    """Why the format cannot hold a weight of `shape`; None if it can."""
    if len(shape) < 2:
        return f"shape {list(shape)}, but {format.name} wants [..., N, K]"
    for axis, extent, multiple in zip("NK", shape[-2:], format.block, strict=True):
        if not format.ragged and extent % multiple:
            return (
                f"{axis} = {extent} is not a multiple of {multiple} ({format.name}); "
                'keep it in its source dtype (format = "keep" in a recipe)'
            )
    return None


@lru_cache(maxsize=1 << 10)
def _specs(format: Format, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
    """As `Format.specs`, of a shape that the format can hold."""
    *lead, N, K = shape
    block_n, block_k = format.block
    codes = (*lead, N, K // format.codes_per_byte)
    scales = (*lead, -(-N // block_n), -(-K // block_k))
    specs = {
        "qdata": TensorSpec(dtype=format.qdata_dtype, shape=codes),
        "scale": TensorSpec(dtype=format.scale_dtype, shape=scales),
    }
    if format.has_global_scale:
        specs["global_scale"] = TensorSpec(dtype=torch.float32, shape=tuple(lead))
    return MappingProxyType(specs)


def check_tensors(
    tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], name: str
) -> None:
    """Refuse parts of the weight called `name` that are not what `specs` says, no more, no less.

    Raises:
        CheckpointError: names the weight, the part, its dtype and shape, and those wanted.
    """
    found = {
        part: TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape))
        for part, tensor in tensors.items()
    }
    for part in {**specs, **found}:
        if found.get(part) != specs.get(part):
            raise CheckpointError(
                f"{name}.{part} is {found.get(part, 'missing')}, but it should be "
                f"{specs.get(part, 'missing')}; prepare or convert the checkpoint again"
            )


def dtype_text(dtype: torch.dtype) -> str:
    """`dtype` as messages say it, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def check_values(w: Tensor, name: str) -> None:
    """Refuse a source dtype we do not quantize from, and any NaN or Inf.

    Raises:
        UnsupportedError: the dtype is not bfloat16, float16 or float32.
        NonFiniteError: names the tensor, the index and the value of the first one found.
    """
    if w.dtype not in SOURCE_DTYPES:
        wanted = ", ".join(map(dtype_text, SOURCE_DTYPES))
        raise UnsupportedError(f"{name}: dtype {dtype_text(w.dtype)}, not {wanted}")
    # amax passes NaN on, and costs a tenth of isfinite over every element.
    if w.numel() and not torch.isfinite(w.abs().amax()):
        index = (~torch.isfinite(w)).nonzero()[0].tolist()
        value = w[tuple(index)].item()
        raise NonFiniteError(
            f"{name}: {value} at index {index}; a quantized weight cannot hold it. "
            "Mend the source checkpoint or fetch it again"
        )
