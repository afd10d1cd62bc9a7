"""The base class of formats: class data, `quantize` and `dequantize`.

Decisions, each with the failure it prevents:

* A format is named, never inferred from a dtype. Otherwise a uint8 scale could be decoded as
  another type.
* In memory every scale is a multiplier, `w = decode(qdata) * scale * global_scale`; reciprocals
  exist only in dialects. Otherwise a weight could be scaled by the square of its global scale.
* Properties are class data, and `specs` needs no tensor. Otherwise a plan would have to read
  weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from moequant.errors import NonFiniteError, RecipeError, UnsupportedError
from moequant.formats.blocks import expand_blocks, grouped
from moequant.formats.elements import pack_nibbles, unpack_nibbles
from moequant.formats.importance import importance_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moequant.formats.elements import Element

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

WHOLE = 1 << 30
"""Rows or columns of a block that spans the matrix."""

WEIGHTED = "weighted"
"""Value of the option `search` that needs the mean squares of a weight's input channels."""

Use = Literal["convert", "dequantize", "read", "run"]
"""What a format can be used for.

* convert: recipes may name it, and weights of any source are quantized to it;
* dequantize: recipes may name it, and quantized weights are dequantized to it;
* read: quantized sources may contain it;
* run: `FusedExperts` runs weights in it.
"""

# A float32 tile of 1 MiB stays in the second-level cache with its few temporaries.
_TILE_ELEMENTS = 1 << 18
_TILE_COPIES = 24
"""Upper bound of a format's temporaries, in float32 copies of a tile."""


def tile_rows(K: int, multiple: int) -> int:
    """Rows of a tile of a weight with K columns: whole blocks of `multiple` rows."""
    return max(1, _TILE_ELEMENTS // (max(K, 1) * multiple)) * multiple


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor, which need not exist yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size in memory and on disk."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_text(self.dtype)} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight, or a batch of them, in a format: `w = decode(qdata) * scale * global_scale`.

    Attributes:
        format: name of the format, which alone determines how the bytes are decoded.
        qdata: [..., N, K / codes_per_byte] codes; of two 4-bit codes in a byte, the even column is
            in the low nibble.
        scale: [..., ceil(N / block_n), ceil(K / block_k)] multiplier, in the format's scale dtype.
        global_scale: [...] float32 multiplier, or None if the format has none.
        shape: [..., N, K], logical.
    """

    format: str
    qdata: Tensor
    scale: Tensor
    global_scale: Tensor | None = None
    shape: torch.Size

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weight, by field name."""
        parts = {"qdata": self.qdata, "scale": self.scale}
        if self.global_scale is not None:
            parts["global_scale"] = self.global_scale
        return parts

    def map(
        self, fn: Callable[[Tensor], Tensor], shape: torch.Size | None = None
    ) -> QuantizedWeight:
        """Apply `fn` to every tensor; `shape` is the new logical shape if `fn` changes it."""
        parts: dict[str, Any] = {name: fn(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **parts, shape=self.shape if shape is None else shape)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on `device`."""
        return self.map(lambda t: t.to(device))

    def __getitem__(self, index: int) -> QuantizedWeight:
        """Weight `index` of a batch, as a view.

        Raises:
            IndexError: the weight has no leading dimension, or `index` is out of range.
        """
        if len(self.shape) < 3:
            raise IndexError("a single weight has no leading dimension to index")
        return self.map(lambda t: t[index], shape=self.shape[1:])


StoredWeight = Tensor | QuantizedWeight
"""A weight [N, K] of a source: a plain tensor, or codes and scales."""


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack weights of one format and shape into a batch [len(weights), ...]; copies."""
    first = weights[0]
    if any(w.format != first.format or w.shape != first.shape for w in weights):
        raise UnsupportedError("cannot stack weights of different formats or shapes")
    parts: dict[str, Any] = {
        k: torch.stack([w.tensors()[k] for w in weights]) for k in first.tensors()
    }
    return replace(first, **parts, shape=torch.Size((len(weights), *first.shape)))


def check_options(
    format: str, options: Mapping[str, str], known: Mapping[str, Sequence[str]]
) -> None:
    """Check that options of a format are among the `known` ones and have one of their values.

    Raises:
        RecipeError: an unknown option or value.
    """
    for key, value in options.items():
        if key not in known:
            listed = ", ".join(known) or "none"
            raise RecipeError(f"{format} has no option {key!r}; its options: {listed}")
        if value not in known[key]:
            allowed = ", ".join(known[key])
            raise RecipeError(f"{format}: {key} = {value!r}, but must be one of: {allowed}")


class Format:
    """Numerics of a quantized weight.

    Subclasses set the class attributes and implement `_quantize`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    uses: ClassVar[frozenset[Use]] = frozenset({"convert", "read", "run"})
    block: ClassVar[tuple[int, int]]
    """Rows and columns that share a scale."""
    ragged: ClassVar[bool] = False
    """Whether the last block of a row or column may be incomplete."""
    element: ClassVar[Element]
    """The element type of codes."""
    scale_dtype: ClassVar[torch.dtype]
    has_global_scale: ClassVar[bool] = False
    """Whether the weights of a fused set (gate and up of an expert) share an FP32 scale."""
    shares_scale: ClassVar[bool] = False
    """Whether their only scale is one number, which they share."""
    activations: ClassVar[str]
    """Activations of the format's GEMM: "fp8_group128", "fp8_token" or "none" (weight-only)."""
    static_activations: ClassVar[str | None] = None
    """Their scheme where static scales of activations came with the weights; None if none may."""
    static_largest: ClassVar[float] = 0.0
    """Largest magnitude of activations with a static scale of 1."""
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Allowed values of each option, the default first."""
    warned_options: ClassVar[Mapping[tuple[str, str], str]] = {}
    """Options and values that lower the error of weights but raise that of a trained model: how its
    KL divergence from the unquantized model changed, by docs/quality.md."""
    has_gaussian_search: ClassVar[bool] = False
    """Whether recipes may ask for a weighted search by mean squares that weights predict."""
    gptq_options: ClassVar[Mapping[str, str]] = {}
    """Options that have other defaults where GPTQ chooses the codes."""
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
    def has_weighted_search(self) -> bool:
        """Whether scales can be chosen by the mean squares of input channels."""
        return WEIGHTED in self.options.get("search", ())

    @property
    def is_plain(self) -> bool:
        """Whether the format is an unquantized dtype."""
        return self.element.dtype in SOURCE_DTYPES

    @property
    def tile_multiple(self) -> int:
        """Tiles of rows have a multiple of this many: 1 where all rows share a scale."""
        return 1 if self.block[0] == WHOLE else self.block[0]

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
        """The values of all options, with defaults filled in.

        Raises:
            RecipeError: an unknown option or value.
        """
        given = options or {}
        check_options(self.name, given, self.options)
        return {key: given.get(key, values[0]) for key, values in self.options.items()}

    def check_shape(self, shape: Sequence[int], name: str = "weight") -> None:
        """Check that the format supports a shape.

        Raises:
            UnsupportedError: fewer than two dimensions, or K is not a multiple of the group.
        """
        fault = _fault(self, tuple(shape))
        if fault is not None:
            raise UnsupportedError(f"{name}: {fault}")

    def specs(self, shape: Sequence[int], name: str = "weight") -> Mapping[str, TensorSpec]:
        """Dtype and shape of each tensor that `quantize` returns, by field of QuantizedWeight.

        Raises:
            UnsupportedError: as `check_shape`.
        """
        self.check_shape(shape, name)
        return _specs(self, tuple(shape))

    def quantize(
        self,
        w: Tensor,
        options: Mapping[str, str] | None = None,
        *,
        name: str = "weight",
        mean_square: Tensor | None = None,
    ) -> QuantizedWeight:
        """Quantize one weight, or a batch of them over the leading dimensions.

        Args:
            w: [..., N, K] bfloat16, float16 or float32.
            options: values for `self.options`; the others take their default.
            name: name of the weight for error messages.
            mean_square: [K] float32, the mean square of each input channel, for the option
                `search = "weighted"` only.

        Raises:
            UnsupportedError: an unsupported shape or dtype.
            NonFiniteError: `w` has NaN or Inf; the message has index and value.
            RecipeError: an unknown option or value, or mean squares that the options do not use
                or lack.
            StatisticsError: invalid mean squares.
        """
        mean_squares = None if mean_square is None else [mean_square]
        return self.quantize_fused([w], options, names=[name], mean_squares=mean_squares)[0]

    def quantize_fused(
        self,
        weights: Sequence[Tensor],
        options: Mapping[str, str] | None = None,
        *,
        names: Sequence[str],
        mean_squares: Sequence[Tensor] | None = None,
    ) -> list[QuantizedWeight]:
        """Quantize weights that engines fuse, such as gate and up of one expert.

        They share a global scale if the format has one, or their scale if `shares_scale`; otherwise
        the result equals `quantize` of each weight. Arguments and errors as `quantize`, with one
        name and one mean square per weight; all weights have the same leading dimensions.
        """
        resolved = self.resolve_options(options)
        for w, name in zip(weights, names, strict=True):
            self.check_shape(w.shape, name)
            check_values(w, name)
        if len({w.shape[:-2] for w in weights}) > 1:
            shapes = ", ".join(str(list(w.shape)) for w in weights)
            raise UnsupportedError(
                f"{' and '.join(names)}: shapes {shapes}, but the leading dimensions of weights "
                "that are quantized together must be equal"
            )
        weights = [w.detach() for w in weights]
        importances = self.importances(weights, resolved, mean_squares, names=names)
        shares = self.has_global_scale or self.shares_scale
        shared = self.global_scale(weights, resolved) if shares else None
        return [
            self._quantize_in_tiles(w, resolved, shared, importance)
            for w, importance in zip(weights, importances, strict=True)
        ]

    def importances(
        self,
        weights: Sequence[StoredWeight],
        options: Mapping[str, str],
        mean_squares: Sequence[Tensor] | None,
        *,
        names: Sequence[str],
    ) -> list[Tensor | None]:
        """What each column's error counts for each weight; None without a weighted search.

        Args:
            weights: [..., N, K] each.
            options: every option with its value.
            mean_squares: [K] float32 each; None if there are none.
            names: names of the weights for error messages.

        Returns:
            [K] float32 for each weight on the weight's device, as `importance_of`.

        Raises:
            RecipeError: mean squares that the options do not use, or lack.
            StatisticsError: invalid mean squares.
        """
        weighted = options.get("search") == WEIGHTED
        if mean_squares is None:
            if weighted:
                raise RecipeError(
                    f"{names[0]}: search = 'weighted' needs the mean squares of the input "
                    "channels, but there are none; `moequant calibrate` measures them"
                )
            return [None] * len(weights)
        if not weighted:
            raise RecipeError(
                f"{names[0]}: mean squares of the input channels, but only search = 'weighted' "
                f"uses them; the options are {dict(options)}"
            )
        return [
            importance_of(mean_square, w.shape[-1], name).to(
                w.qdata.device if isinstance(w, QuantizedWeight) else w.device
            )
            for w, mean_square, name in zip(weights, mean_squares, names, strict=True)
        ]

    def workspace_bytes(self, shape: Sequence[int]) -> int:
        """Upper bound of the temporary memory of `quantize` for one weight [N, K]."""
        rows = tile_rows(shape[-1], self.tile_multiple)
        tile_bytes = rows * shape[-1] * torch.float32.itemsize
        magnitudes = math.prod(shape) * torch.float32.itemsize  # in check_values
        return max(magnitudes, _TILE_COPIES * tile_bytes)

    def _quantize_in_tiles(
        self,
        w: Tensor,
        options: Mapping[str, str],
        global_scale: Tensor | None,
        importance: Tensor | None,
    ) -> QuantizedWeight:
        """Quantize row tiles that fit a cache, and concatenate them; tiles are independent.

        Batches are not tiled: they come from callers on a GPU, where launches cost more than
        memory.
        """
        rows = tile_rows(w.shape[-1], self.tile_multiple)
        parts = []
        for tile in [w] if w.ndim > 2 else torch.split(w, rows):
            codes, scale = self._quantize(
                tile.float().contiguous(), options, global_scale, importance
            )
            parts.append((codes if self.codes_per_byte == 1 else pack_nibbles(codes), scale))
        qdata, scale = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return QuantizedWeight(
            format=self.name,
            qdata=qdata,
            scale=parts[0][1] if self.shares_scale else scale,
            global_scale=global_scale if self.has_global_scale else None,
            shape=w.shape,
        )

    def global_scale(self, weights: Sequence[Tensor], options: Mapping[str, str]) -> Tensor:
        """The float32 scale [...] that a fused set shares, global or not, by the largest magnitude.

        Args:
            weights: [..., N, K] finite, with the same leading dimensions.
            options: every option with its value.
        """
        raise NotImplementedError(f"{self.name} has no scale that weights share")

    def _quantize(
        self,
        w: Tensor,
        options: Mapping[str, str],
        global_scale: Tensor | None,
        importance: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Codes [..., N, K], one in each element, and scales of contiguous finite float32 `w`.

        Args:
            w: [..., N, K] of a supported shape.
            options: every option with its value.
            global_scale: [...] float32, if the format has one, or `shares_scale`.
            importance: [K] float32, if `search` is "weighted".
        """
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
    return int(torch.tensor(number, dtype=torch.float32).to(dtype).view(bits).item())


# The weights of a model have a handful of shapes.
@lru_cache(maxsize=1 << 10)
def _fault(format: Format, shape: tuple[int, ...]) -> str | None:
    """Why the format does not support a weight of `shape`; None if it does."""
    if len(shape) < 2:
        return f"shape {list(shape)}, but {format.name} needs [..., N, K]"
    for axis, extent, multiple in zip("NK", shape[-2:], format.block, strict=True):
        if not format.ragged and extent % multiple:
            return (
                f"{axis} = {extent} is not a multiple of {multiple} ({format.name}); "
                'keep it in its source dtype (format = "keep" in a recipe)'
            )
    return None


@lru_cache(maxsize=1 << 10)
def _specs(format: Format, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
    """As `Format.specs`, for a supported shape."""
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


def dtype_text(dtype: torch.dtype) -> str:
    """The name of a dtype for messages, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def check_values(w: Tensor, name: str) -> None:
    """Check that a weight has a supported dtype and only finite values.

    Raises:
        UnsupportedError: the dtype is not bfloat16, float16 or float32.
        NonFiniteError: the message has the weight, and index and value of the first NaN or Inf.
    """
    if w.dtype not in SOURCE_DTYPES:
        wanted = ", ".join(map(dtype_text, SOURCE_DTYPES))
        raise UnsupportedError(f"{name}: dtype {dtype_text(w.dtype)}, but must be one of: {wanted}")
    # amax propagates NaN, and takes a tenth of the time of isfinite over all elements.
    if w.numel() and not torch.isfinite(w.abs().amax()):
        index = (~torch.isfinite(w)).nonzero()[0].tolist()
        value = w[tuple(index)].item()
        raise NonFiniteError(
            f"{name}: {value} at index {index}, but a quantized weight must be finite; correct the "
            "source checkpoint or fetch it again"
        )
