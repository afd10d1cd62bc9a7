"""Encodings: how a quantized weight is stored as tensors. Dialects share these classes.

| class | codes | scale | other |
|---|---|---|---|
| Fp8Blocks | E4M3 [N, K] | FP32 [ceil(N/128), ceil(K/128)] | |
| Nvfp4Packed | U8 [N, K/2] | E4M3 [N, K/16] | FP32 [1], the reciprocal global scale |
| Nvfp4Multiplied | U8 [N, K/2] | E4M3 [N, K/16] | FP32 [], the global scale |
| E8m0Groups | as in memory | U8 [N, K/32], the E8M0 byte | |
| AsInMemory | as in memory | as in memory | FP32 [], the global scale, if any |
| Mxfp4Blocks | U8 [N, K/32, 16] | U8 [N, K/32], the E8M0 byte | |
| Int4Packed | I32 [N, K/8], each code + 8 | BF16 [N, K/128] | I64 [2], the logical shape |
| Plain | BF16 [N, K], the weight itself | | |

Read-only: Fp8Channels, E4M3 with one scale per row or a single one; Fp8BlocksFlexible, as
Fp8Blocks with either name of the scale, also four-dimensional; Int4Groups, as Int4Packed with
groups of any size; Mxfp4Bytes, I8 [N, K/2] with E8M0.

Sources: compressed-tensors 0.20, `compressors/`; DeepSeek-V3, inference/kernel.py (Fp8Blocks);
NVIDIA/Model-Optimizer 0.47, `torch/export/` (Nvfp4Multiplied).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.dialects.names import is_expert
from moequant.dialects.tensors import (
    cast_exactly,
    check_columns,
    check_shape,
    has_values,
    read_matrix,
    read_tensor,
)
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import QuantizedWeight, TensorSpec, get_format, plain_weight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.formats import Format

# The sign bits of two nibbles; flipping them turns two's complement into code + 8 and back.
_NIBBLE_SIGNS = 0x88


class Encoding(ABC):
    """Names, dtypes and shapes of the tensors of a weight of one format in a dialect.

    `decode` is the inverse of `encode`, and also accepts variants of other writers.
    """

    format: Format
    """The format of the weights."""
    read_only: bool = False
    """Whether the encoding is only read; `check`, `specs` and `encode` may not be called then."""
    suffixes: tuple[str, ...]
    """Names after `module.` in the order of writing, the codes first."""

    @abstractmethod
    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight of `module` in `tensors`, which may contain other modules' tensors.

        On the meta device, tensors have no values and only dtypes and shapes are checked.

        Raises:
            CheckpointError: a tensor is missing or has the wrong dtype or shape.
            UnsupportedError: a scale has values that the format's scale dtype cannot represent.
        """

    def as_read(self, q: QuantizedWeight) -> QuantizedWeight:
        """The weight that `decode` returns for what `encode` writes for `q`."""
        return q

    def stored_ratio(self, q: QuantizedWeight) -> float:
        """The exact numbers on disk divided by those that `decode` returns; 1 if exact."""
        return 1.0

    def check(self, module: str, shape: Sequence[int], *, rows_follow: bool = False) -> None:
        """Check that a weight is [N, K], and that the format and engines support its shape.

        Args:
            module: the weight's module.
            shape: the weight's shape.
            rows_follow: whether engines merge it with a layer whose rows come after its own.

        Raises:
            UnsupportedError: the shape is not supported.
        """
        assert not self.read_only, type(self).__name__
        self.format.check_shape(shape, module)
        if len(shape) != 2:
            raise UnsupportedError(f"{module}: shape {list(shape)}, but must be [N, K]")

    def specs(self, module: str, shape: Sequence[int]) -> dict[str, TensorSpec]:
        """Dtype and shape of each tensor that `encode` returns for a weight [N, K], by name."""
        parts = self._specs(self.format.specs(shape, module), shape)
        return dict(zip(self._names(module), parts, strict=True))

    def encode(
        self, module: str, q: QuantizedWeight, *, consume: bool = False
    ) -> dict[str, Tensor]:
        """The tensors of one weight [N, K], by full name; `consume` as `Dialect.to_disk`."""
        return dict(zip(self._names(module), self._encode(q, consume=consume), strict=True))

    def _names(self, module: str) -> list[str]:
        return [f"{module}.{suffix}" for suffix in self.suffixes]

    def _specs(
        self, parts: Mapping[str, TensorSpec], shape: Sequence[int]
    ) -> tuple[TensorSpec, ...]:
        """Specs in the order of `suffixes`, from the specs of QuantizedWeight's fields.

        By default as in memory.
        """
        return tuple(parts.values())

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        """Tensors in the order of `suffixes`; codes are changed in place only if `consume`.

        By default as in memory.
        """
        return tuple(q.tensors().values())

    def _read_scale(
        self,
        tensors: Mapping[str, Tensor],
        name: str,
        shape: Sequence[int],
        *dtypes: torch.dtype,
    ) -> Tensor:
        """The scale called `name` of a weight of `shape` [N, K], with one of `dtypes`."""
        scale = read_tensor(tensors, name, *dtypes)
        check_shape(name, scale, self.format.specs(shape)["scale"].shape)
        return scale


class Fp8Blocks(Encoding):
    """`fp8_block`: codes and scales as in memory, under the dialect's names.

    Other writers store the scale as BF16, FP16 or E8M0, which convert to float32 exactly. Ragged
    last blocks are read. They are written only where engines support them: in rows of linear layers
    other than routed experts, such as the 576 of DeepSeek's `kv_a_proj_with_mqa`; or everywhere if
    `ragged`.
    """

    format = get_format("fp8_block")

    def __init__(self, scale: str, *, codes: str = "weight", ragged: bool = False) -> None:
        self.suffixes = (codes, scale)
        self._ragged = ragged

    def check(self, module: str, shape: Sequence[int], *, rows_follow: bool = False) -> None:
        """As Encoding; refuses ragged blocks that engines do not support."""
        super().check(module, shape)
        if self._ragged:
            return
        what = "an expert" if is_expert(module) else "a linear layer"
        if rows_follow and not is_expert(module):
            what = "a linear layer that they merge with a following one"
        for axis, extent, multiple in zip("NK", shape, self.format.block, strict=True):
            if extent % multiple and (axis == "K" or rows_follow or is_expert(module)):
                raise UnsupportedError(
                    f"{module}: {axis} = {extent} is not a multiple of {multiple}, which vLLM and "
                    f'SGLang require for {what}. Keep it in its source dtype (format = "keep" in a '
                    "recipe), choose another format, or the dialect moequant, which only "
                    "moequant's own runtime loads"
                )

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding."""
        weight, scale = self._names(module)
        qdata = read_matrix(tensors, weight, torch.float8_e4m3fn)
        values = self._read_scale(
            tensors,
            scale,
            qdata.shape,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float8_e8m0fnu,
        )
        return QuantizedWeight(
            format=self.format.name,
            qdata=qdata,
            scale=values.float(),
            global_scale=None,
            shape=qdata.shape,
        )


class Nvfp4Packed(Encoding):
    """`nvfp4`: the global scale is stored as its reciprocal, a divisor.

    A power of two is stored exactly. For any other global scale g (option `global_scale = "exact"`)
    the file has r = 1 / g rounded to float32, by which engines divide, and `decode` returns 1 / r,
    rounded, which may differ from g by one unit in the last place. Encoding 1 / r again gives r:
    three reciprocals in a row equal one, for every float32 whose reciprocal is a normal number.
    """

    format = get_format("nvfp4")
    suffixes = ("weight_packed", "weight_scale", "weight_global_scale")

    def as_read(self, q: QuantizedWeight) -> QuantizedWeight:
        """As Encoding: the reciprocal of the reciprocal, each rounded to float32."""
        assert q.global_scale is not None
        return replace(q, global_scale=q.global_scale.reciprocal().reciprocal())

    def stored_ratio(self, q: QuantizedWeight) -> float:
        """As Encoding: 1 / (g * r), where r = 1 / g is on disk; the product is exact in float64."""
        assert q.global_scale is not None
        return 1 / (q.global_scale.item() * q.global_scale.reciprocal().item())

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding; the divisor may be [1] or []."""
        packed, scale, divisor = self._names(module)
        qdata = read_matrix(tensors, packed, torch.uint8)
        N, K = qdata.shape[0], 2 * qdata.shape[1]
        check_columns(packed, K, self.format.block[1])
        values = self._read_scale(tensors, scale, (N, K), torch.float8_e4m3fn)
        reciprocal = read_tensor(tensors, divisor, torch.float32)
        check_shape(divisor, reciprocal, (1,), ())
        global_scale = reciprocal.reshape(())
        if has_values(reciprocal):
            global_scale = global_scale.reciprocal()
            _check_divisor(divisor, reciprocal, global_scale)
        return QuantizedWeight(
            format=self.format.name,
            qdata=qdata,
            scale=values,
            global_scale=global_scale,
            shape=torch.Size((N, K)),
        )

    def _specs(
        self, parts: Mapping[str, TensorSpec], shape: Sequence[int]
    ) -> tuple[TensorSpec, ...]:
        return parts["qdata"], parts["scale"], TensorSpec(dtype=torch.float32, shape=(1,))

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        assert q.global_scale is not None
        return q.qdata, q.scale, q.global_scale.reciprocal().reshape(1)


class Nvfp4Multiplied(Encoding):
    """`nvfp4` as Model-Optimizer writes it: the global scale multiplies, as in memory."""

    format = get_format("nvfp4")
    suffixes = ("weight", "weight_scale", "weight_scale_2")

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding; the global scale may be [1], and 0 if all weights are zero."""
        weight, scale, global_scale = self._names(module)
        qdata = read_matrix(tensors, weight, torch.uint8)
        N, K = qdata.shape[0], 2 * qdata.shape[1]
        check_columns(weight, K, self.format.block[1])
        values = self._read_scale(tensors, scale, (N, K), torch.float8_e4m3fn)
        multiplier = read_tensor(tensors, global_scale, torch.float32)
        check_shape(global_scale, multiplier, (), (1,))
        if has_values(multiplier) and not (torch.isfinite(multiplier) and multiplier >= 0):
            raise CheckpointError(
                f"{global_scale}: {multiplier.item()}, but must be finite and not negative; fetch "
                "or convert the checkpoint again"
            )
        return QuantizedWeight(
            format=self.format.name,
            qdata=qdata,
            scale=values,
            global_scale=multiplier.reshape(()),
            shape=torch.Size((N, K)),
        )


class E8m0Groups(Encoding):
    """A format with E8M0 scales, which are stored as plain bytes; codes are as in memory."""

    def __init__(self, format: str, codes: str) -> None:
        self.format = get_format(format)
        self.suffixes = (codes, "weight_scale")

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding; the scale's dtype may also be E8M0."""
        codes, scale = self._names(module)
        qdata = read_matrix(tensors, codes, self.format.qdata_dtype)
        N, K = qdata.shape[0], self.format.codes_per_byte * qdata.shape[1]
        check_columns(codes, K, self.format.block[1])
        values = self._read_scale(tensors, scale, (N, K), torch.uint8, torch.float8_e8m0fnu)
        return QuantizedWeight(
            format=self.format.name,
            qdata=qdata,
            scale=values.view(torch.float8_e8m0fnu),
            global_scale=None,
            shape=torch.Size((N, K)),
        )

    def _specs(
        self, parts: Mapping[str, TensorSpec], shape: Sequence[int]
    ) -> tuple[TensorSpec, ...]:
        return parts["qdata"], TensorSpec(dtype=torch.uint8, shape=parts["scale"].shape)

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        return q.qdata, q.scale.view(torch.uint8)


class AsInMemory(Encoding):
    """Any format: codes, scale and global scale with the dtypes and shapes they have in memory."""

    def __init__(self, format: Format) -> None:
        self.format = format
        parts = ("codes", "scale", "global_scale")
        self.suffixes = tuple(
            f"weight_{part}" for part in parts[: 3 if format.has_global_scale else 2]
        )

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding."""
        codes, scale, *others = self._names(module)
        qdata = read_matrix(tensors, codes, self.format.qdata_dtype)
        N, K = qdata.shape[0], self.format.codes_per_byte * qdata.shape[1]
        if not self.format.ragged:
            check_columns(codes, K, self.format.block[1])
        return QuantizedWeight(
            format=self.format.name,
            qdata=qdata,
            scale=self._read_scale(tensors, scale, (N, K), self.format.scale_dtype),
            global_scale=read_tensor(tensors, others[0], torch.float32) if others else None,
            shape=torch.Size((N, K)),
        )


class Mxfp4Blocks(Encoding):
    """`mxfp4` as gpt-oss was released: 16 bytes of codes per block, and the E8M0 scale as a byte.

    Source: openai/gpt-oss, gpt_oss/torch/weights.py.
    """

    format = get_format("mxfp4")
    suffixes = ("blocks", "scales")

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding."""
        blocks, scales = self._names(module)
        codes = read_tensor(tensors, blocks, torch.uint8)
        group = self.format.block[1]
        if codes.ndim != 3 or codes.shape[2] != group // 2:
            check_shape(blocks, codes, (*codes.shape[:2], group // 2))
        shape = torch.Size((codes.shape[0], group * codes.shape[1]))
        return QuantizedWeight(
            format=self.format.name,
            qdata=codes.reshape(shape[0], shape[1] // 2),
            scale=self._read_scale(tensors, scales, shape, torch.uint8).view(torch.float8_e8m0fnu),
            global_scale=None,
            shape=shape,
        )

    def _specs(
        self, parts: Mapping[str, TensorSpec], shape: Sequence[int]
    ) -> tuple[TensorSpec, ...]:
        group = self.format.block[1]
        blocks = (shape[0], shape[1] // group, group // 2)
        return (
            TensorSpec(dtype=torch.uint8, shape=blocks),
            TensorSpec(dtype=torch.uint8, shape=parts["scale"].shape),
        )

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        N, groups = q.scale.shape
        return q.qdata.reshape(N, groups, self.format.block[1] // 2), q.scale.view(torch.uint8)


class Int4Packed(Encoding):
    """`w4a8`: eight codes in an int32, column 8j + i in bits 4i to 4i + 3, with an offset of 8.

    On little-endian machines, the only ones that torch and safetensors support, these are the bytes
    of `qdata` with the sign bit of every nibble flipped.
    """

    format = get_format("w4a8")
    suffixes = ("weight_packed", "weight_scale", "weight_shape")

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding; the shape may be missing, and the scale FP16 or FP32 if exact in BF16."""
        packed, scale, shape = self._names(module)
        words = read_matrix(tensors, packed, torch.int32)
        N, K = words.shape[0], 8 * words.shape[1]
        check_columns(packed, K, self.format.block[1])
        values = self._read_scale(
            tensors, scale, (N, K), torch.bfloat16, torch.float16, torch.float32
        )
        _check_logical_shape(tensors, shape, (N, K))
        return QuantizedWeight(
            format=self.format.name,
            qdata=_codes_of(words),
            scale=cast_exactly(scale, values, torch.bfloat16),
            global_scale=None,
            shape=torch.Size((N, K)),
        )

    def _specs(
        self, parts: Mapping[str, TensorSpec], shape: Sequence[int]
    ) -> tuple[TensorSpec, ...]:
        N, K = shape
        words = TensorSpec(dtype=torch.int32, shape=(N, K // 8))
        return words, parts["scale"], TensorSpec(dtype=torch.int64, shape=(2,))

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        codes = q.qdata.bitwise_xor_(_NIBBLE_SIGNS) if consume else q.qdata ^ _NIBBLE_SIGNS
        words = codes.view(torch.int32)
        shape = _logical_shape(*q.shape)
        return words, q.scale, shape if consume else shape.clone()


@lru_cache(maxsize=1 << 10)
def _logical_shape(N: int, K: int) -> Tensor:
    """The value of `weight_shape`; cached, so callers must not change it."""
    return torch.tensor([N, K], dtype=torch.int64, device="cpu")


class Fp8Channels(Encoding):
    """`fp8_channel`: E4M3 codes, one scale per row, [N, 1] or [N], or a single one."""

    format = get_format("fp8_channel")

    def __init__(self, *scales: str, read_only: bool = True) -> None:
        self.suffixes = ("weight", *scales)
        self.read_only = read_only

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding; exactly one of the scale's names must be present."""
        weight, *names = self._names(module)
        scale = _only_one(tensors, names)
        qdata = read_matrix(tensors, weight, torch.float8_e4m3fn)
        N = qdata.shape[0]
        values = read_tensor(tensors, scale, torch.float32, torch.bfloat16, torch.float16)
        check_shape(scale, values, (N, 1), (N,), (1,), ())
        return QuantizedWeight(
            format=self.format.name,
            qdata=qdata,
            scale=values.float().reshape(-1, 1).expand(N, 1),
            global_scale=None,
            shape=qdata.shape,
        )


class Fp8BlocksFlexible(Encoding):
    """`fp8_block` as written by Model-Optimizer and related tools.

    The scale is called `weight_scale` or `weight_scale_inv`, and is a multiplier under both names.
    Its shape is [ceil(N/128), ceil(K/128)], [.., 1, .., 1], or [] for a single block.
    """

    format = get_format("fp8_block")
    read_only = True

    suffixes = ("weight", "weight_scale", "weight_scale_inv")

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding; exactly one of the scale's names must be present."""
        weight, *names = self._names(module)
        name = _only_one(tensors, names)
        qdata = read_matrix(tensors, weight, torch.float8_e4m3fn)
        values = read_tensor(tensors, name, torch.float32, torch.bfloat16, torch.float16)
        rows, columns = self.format.specs(qdata.shape)["scale"].shape
        scalar = [()] if rows == columns == 1 else []
        check_shape(name, values, (rows, columns), (rows, 1, columns, 1), *scalar)
        return QuantizedWeight(
            format=self.format.name,
            qdata=qdata,
            scale=values.float().reshape(rows, columns),
            global_scale=None,
            shape=qdata.shape,
        )


class Int4Groups(Encoding):
    """`int4`: as `Int4Packed`, with groups of any size and a scale of any float dtype."""

    format = get_format("int4")
    read_only = True

    suffixes = ("weight_packed", "weight_scale", "weight_shape")

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding; the shape may be missing."""
        packed, scale, shape = self._names(module)
        words = read_matrix(tensors, packed, torch.int32)
        N, K = words.shape[0], 8 * words.shape[1]
        values = read_matrix(tensors, scale, torch.bfloat16, torch.float16, torch.float32)
        if values.shape[0] != N or values.shape[1] == 0 or K % values.shape[1]:
            raise CheckpointError(
                f"{scale}: shape {list(values.shape)}, but must be [{N}, a divisor of {K}], for "
                f"{N} rows and {K} columns; fetch the checkpoint again"
            )
        _check_logical_shape(tensors, shape, (N, K))
        return QuantizedWeight(
            format=self.format.name,
            qdata=_codes_of(words),
            scale=values.float(),
            global_scale=None,
            shape=torch.Size((N, K)),
        )


class Mxfp4Bytes(Encoding):
    """`mxfp4` as DeepSeek-V4 was released: codes I8 [N, K/2], scale E8M0 or its byte [N, K/32]."""

    format = get_format("mxfp4")
    read_only = True

    def __init__(self, scale: str) -> None:
        self.suffixes = ("weight", scale)

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding."""
        weight, scale = self._names(module)
        codes = read_matrix(tensors, weight, torch.int8, torch.uint8)
        N, K = codes.shape[0], 2 * codes.shape[1]
        group = self.format.block[1]
        check_columns(weight, K, group)
        values = read_tensor(tensors, scale, torch.float8_e8m0fnu, torch.uint8)
        check_shape(scale, values, (N, K // group))
        return QuantizedWeight(
            format=self.format.name,
            qdata=codes.view(torch.uint8),
            scale=values.view(torch.float8_e8m0fnu),
            global_scale=None,
            shape=torch.Size((N, K)),
        )


class Plain(Encoding):
    """`bf16`: the weight itself, as in an unquantized model."""

    format = get_format("bf16")
    suffixes = ("weight",)

    def decode(self, module: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """As Encoding."""
        (weight,) = self._names(module)
        return plain_weight(read_matrix(tensors, weight, torch.bfloat16))

    def _specs(
        self, parts: Mapping[str, TensorSpec], shape: Sequence[int]
    ) -> tuple[TensorSpec, ...]:
        return (parts["qdata"],)

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        return (q.qdata,)


def _only_one(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """The one of `names` that is present; the first if none is.

    Raises:
        CheckpointError: several are present.
    """
    there = [name for name in names if name in tensors]
    if len(there) > 1:
        raise CheckpointError(
            f"{' and '.join(there)}: both are present, but only one is allowed; fetch the "
            "checkpoint again"
        )
    return there[0] if there else names[0]


def _check_divisor(name: str, stored: Tensor, multiplier: Tensor) -> None:
    if not (torch.isfinite(multiplier) and multiplier > 0):
        raise CheckpointError(
            f"{name}: {stored.item()}, but a divisor and its reciprocal must be positive and "
            "finite; fetch or convert the checkpoint again"
        )


def _codes_of(words: Tensor) -> Tensor:
    """Two's complement nibbles, uint8 [N, K/2], from int32 words [N, K/8]."""
    packed = words.contiguous().view(torch.uint8)
    # On the meta device this would make torch import its compiler: 1 s and 150 MB.
    return packed ^ _NIBBLE_SIGNS if has_values(words) else packed


def _check_logical_shape(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> None:
    """Check `weight_shape` against the shape of codes and scales; the tensor is optional."""
    if name not in tensors:
        return
    stored = read_tensor(tensors, name, torch.int64, torch.int32)
    check_shape(name, stored, (2,))
    if has_values(stored) and tuple(stored.tolist()) != shape:
        raise CheckpointError(
            f"{name}: {stored.tolist()}, but the codes have shape {list(shape)}; fetch or convert "
            "the checkpoint again"
        )
