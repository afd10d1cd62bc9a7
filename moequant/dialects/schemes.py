"""The schemes of each dialect: which formats it has, how they are stored, what it calls them.

| encoding | codes | scale | other |
|---|---|---|---|
| Encoding | as in memory | as in memory, or E8M0 as U8 | FP32 [], the global scale, if any |
| Fp8Blocks | E4M3 [N, K] | FP32 [ceil(N/128), ceil(K/128)] | |
| Fp8BlocksE8m0 | E4M3 [N, K] | E8M0 [ceil(N/128), ceil(K/128)] | |
| Fp8BlocksByRole | E4M3 [N, K] | of routed experts as Fp8Blocks, else as Fp8BlocksE8m0 | |
| Nvfp4Packed | U8 [N, K/2] | E4M3 [N, K/16] | FP32 [1], the reciprocal global scale |
| Nvfp4Multiplied | U8 [N, K/2] | E4M3 [N, K/16] | FP32 [], the global scale |
| Mxfp4Blocks | U8 [N, K/32, 16] | U8 [N, K/32], the E8M0 byte | |
| Int4Packed | I32 [N, K/8], each code + 8 | BF16 [N, K/128] | I64 [2], the logical shape |
| Int4Signed | I8 [N, K/2] | FP32 [N, K/128] | |
| Fp8Channels | E4M3 [N, K] | FP32 [N, 1] | |
| Fp8Tensors | E4M3 [N, K] | FP32 [1], in MODELOPT [] | |

Read-only: Fp8BlocksFlexible, as Fp8Blocks with either name of the scale, also four-dimensional;
Int4Groups, as Int4Packed with groups of any size, also with one code in a byte.

Sources: compressed-tensors 0.20, `compressors/`; DeepSeek-V3, inference/kernel.py (Fp8Blocks);
NVIDIA/Model-Optimizer 0.47, `torch/export/` and `torch/quantization/qtensor/` (MODELOPT).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.dialects.encodings import Encoding
from moequant.dialects.input_scale import InputScale
from moequant.dialects.names import is_expert
from moequant.dialects.tensors import (
    check_columns,
    check_shape,
    check_stated,
    has_values,
    read_matrix,
    read_tensor,
)
from moequant.errors import CheckpointError, UnsupportedError
from moequant.formats import CONVERTIBLE, QuantizedWeight, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.dialects.tensors import Block

    _Tensors = Mapping[str, Tensor]
    _Shape = Sequence[int]

# The sign bits of two nibbles; flipping them turns two's complement into code + 8 and back.
_NIBBLE_SIGNS = 0x88
_E8M0_BYTES = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of E8M0 scales that are written as plain bytes."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_SCALES = (*_FLOATS, torch.float8_e8m0fnu)
"""Dtypes of scales of FP8 blocks; float32 represents all of them exactly."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a dialect stores a format, and what config.json calls that.

    Attributes:
        encoding: the tensors.
        names: values of the field of config.json by which the dialect tells its schemes apart, the
            one that is written first; none where another rule decides.
        strategies: of compressed-tensors, other strategies of weights with which sources are read.
        any_group: of compressed-tensors, whether groups of any size are read.
        input_scale: the tensor with a static scale of its input; None where there is none.
    """

    encoding: Encoding
    names: tuple[object, ...] = ()
    strategies: tuple[str, ...] = ()
    any_group: bool = False
    input_scale: InputScale | None = None


_MULTIPLIER = InputScale(suffix="input_scale")
"""As Model-Optimizer writes it."""
_OF_FP8 = InputScale(suffix="input_scale", of_layer=True)
"""The same, of inputs in FP8."""


def _by_format(*schemes: Scheme) -> dict[str, Scheme]:
    return {scheme.encoding.format.name: scheme for scheme in schemes}


class Fp8Blocks(Encoding):
    """`fp8_block`: codes and scales as in memory, under the dialect's names.

    Other writers store the scale as BF16, FP16 or E8M0, which convert to float32 exactly. Ragged
    last blocks are read. They are written only where engines support them: in rows of linear layers
    other than routed experts, such as the 576 of DeepSeek's `kv_a_proj_with_mqa`; or everywhere if
    `ragged`.
    """

    def __init__(
        self,
        scale: str,
        *,
        codes: str = "weight",
        ragged: bool = False,
        scales: tuple[torch.dtype, ...] = _BLOCK_SCALES,
    ) -> None:
        super().__init__("fp8_block", codes, scale, scales=scales)
        self._ragged = ragged

    def check(self, module: str, shape: _Shape, *, rows_follow: bool = False) -> None:
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


class Fp8BlocksE8m0(Fp8Blocks):
    """`fp8_block` with the scale as E8M0, which holds powers of two and nothing else."""

    def __init__(self, scale: str) -> None:
        super().__init__(scale, scales=(torch.float8_e8m0fnu, *_FLOATS))

    def encode(
        self, module: str, q: QuantizedWeight, *, consume: bool = False
    ) -> dict[str, Tensor]:
        """As Encoding; raises UnsupportedError for a scale that is no power of two."""
        stored = q.scale.to(torch.float8_e8m0fnu)
        wrong = stored.float() != q.scale
        if wrong.any():
            raise UnsupportedError(
                f"{module}: the scale {q.scale[wrong][0].item():g} of an FP8 block is no power of "
                "two, but this dialect stores scales as E8M0; quantize from the unquantized "
                "weights with scale = power_of_two, or choose the dialect fp8"
            )
        return dict(zip(self._names(module), (q.qdata, stored), strict=True))


class Fp8BlocksByRole(Fp8BlocksE8m0):
    """`fp8_block` with the scale as FP32 in routed experts, and as E8M0 elsewhere."""

    def specs(self, module: str, shape: _Shape) -> dict[str, TensorSpec]:
        """As Encoding."""
        found = super().specs(module, shape)
        if is_expert(module):
            _, scale = self._names(module)
            found[scale] = replace(found[scale], dtype=self.format.scale_dtype)
        return found

    def encode(
        self, module: str, q: QuantizedWeight, *, consume: bool = False
    ) -> dict[str, Tensor]:
        """As Encoding; raises as Fp8BlocksE8m0, but not for an expert."""
        if is_expert(module):
            return dict(zip(self._names(module), (q.qdata, q.scale), strict=True))
        return super().encode(module, q, consume=consume)


class Nvfp4Packed(Encoding):
    """`nvfp4`: the global scale is stored as its reciprocal, a divisor.

    A power of two is stored exactly. For any other global scale g (option `global_scale = "exact"`)
    the file has r = 1 / g rounded to float32, by which engines divide, and `decode` returns 1 / r,
    rounded, which may differ from g by one unit in the last place. Encoding 1 / r again gives r:
    three reciprocals in a row equal one, for every float32 whose reciprocal is a normal number.

    The divisor may be [1] or [].
    """

    def __init__(self) -> None:
        super().__init__("nvfp4", "weight_packed", "weight_scale", "weight_global_scale")

    def as_read(self, q: QuantizedWeight) -> QuantizedWeight:
        """As Encoding: the reciprocal of the reciprocal, each rounded to float32."""
        assert q.global_scale is not None
        return replace(q, global_scale=q.global_scale.reciprocal().reciprocal())

    def stored_ratio(self, q: QuantizedWeight) -> float:
        """As Encoding: 1 / (g * r), where r = 1 / g is on disk; the product is exact in float64."""
        assert q.global_scale is not None
        return 1 / (q.global_scale.item() * q.global_scale.reciprocal().item())

    def _read_global_scale(self, tensors: _Tensors, names: Sequence[str]) -> Tensor | None:
        divisor = super()._read_global_scale(tensors, names)
        assert divisor is not None
        if not has_values(divisor):
            return divisor
        global_scale = divisor.reciprocal()
        if not (torch.isfinite(global_scale) and global_scale > 0):
            raise CheckpointError(
                f"{names[1]}: {divisor.item()}, but a divisor and its reciprocal must be positive "
                "and finite; fetch or convert the checkpoint again"
            )
        return global_scale

    def _specs(self, parts: Mapping[str, TensorSpec], shape: _Shape) -> tuple[TensorSpec, ...]:
        return parts["qdata"], parts["scale"], TensorSpec(dtype=torch.float32, shape=(1,))

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        assert q.global_scale is not None
        return q.qdata, q.scale, q.global_scale.reciprocal().reshape(1)


class Nvfp4Multiplied(Encoding):
    """`nvfp4` as Model-Optimizer writes it: the global scale multiplies, as in memory.

    It may be [1], and 0 if all weights are zero.
    """

    def __init__(self) -> None:
        super().__init__("nvfp4", "weight", "weight_scale", "weight_scale_2")

    def _read_global_scale(self, tensors: _Tensors, names: Sequence[str]) -> Tensor | None:
        multiplier = super()._read_global_scale(tensors, names)
        assert multiplier is not None
        if has_values(multiplier) and not (torch.isfinite(multiplier) and multiplier >= 0):
            raise CheckpointError(
                f"{names[1]}: {multiplier.item()}, but must be finite and not negative; fetch "
                "or convert the checkpoint again"
            )
        return multiplier


class Mxfp4Blocks(Encoding):
    """`mxfp4` as gpt-oss was released: 16 bytes of codes per block, and the E8M0 scale as a byte.

    Source: openai/gpt-oss, gpt_oss/torch/weights.py.
    """

    def __init__(self) -> None:
        super().__init__("mxfp4", "blocks", "scales", scales=(torch.uint8,))

    def _read_codes(self, tensors: _Tensors, name: str) -> tuple[Tensor, torch.Size]:
        codes = read_tensor(tensors, name, torch.uint8)
        group = self.format.block[1]
        if codes.ndim != 3 or codes.shape[2] != group // 2:
            check_shape(name, codes, (*codes.shape[:2], group // 2))
        N, groups = codes.shape[:2]
        return codes.reshape(N, groups * group // 2), torch.Size((N, groups * group))

    def _specs(self, parts: Mapping[str, TensorSpec], shape: _Shape) -> tuple[TensorSpec, ...]:
        blocks = (*parts["scale"].shape, self.format.block[1] // 2)
        return TensorSpec(dtype=torch.uint8, shape=blocks), parts["scale"]

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        return q.qdata.reshape(*q.scale.shape, self.format.block[1] // 2), q.scale.view(torch.uint8)


def mxfp4_signed(scale: str) -> Encoding:
    """`mxfp4` as DeepSeek-V4 was released: codes I8, scales E8M0; unsigned bytes are read, too."""
    codes = (torch.int8, torch.uint8)
    scales = (torch.float8_e8m0fnu, torch.uint8)
    return Encoding("mxfp4", "weight", scale, codes=codes, scales=scales)


def e8m0_bytes(format: str, codes: str, *, read_only: bool = False) -> Encoding:
    """Codes as in memory, called `codes`, and E8M0 scales as bytes, called `weight_scale`."""
    return Encoding(format, codes, "weight_scale", scales=_E8M0_BYTES, read_only=read_only)


class Int4Packed(Encoding):
    """`w4a8`: eight codes in an int32, column 8j + i in bits 4i to 4i + 3, with an offset of 8.

    On little-endian machines, the only ones that torch and safetensors support, these are the bytes
    of `qdata` with the sign bit of every nibble flipped. The logical shape may be missing, and the
    scale FP16 or FP32 if exact in BF16.
    """

    def __init__(self, format: str = "w4a8", *, read_only: bool = False) -> None:
        super().__init__(
            format,
            "weight_packed",
            "weight_scale",
            "weight_shape",
            scales=(torch.bfloat16, torch.float16, torch.float32),
            read_only=read_only,
        )

    def decode(
        self, module: str, tensors: _Tensors, *, block: Block | None = None
    ) -> QuantizedWeight:
        """As Encoding; checks the logical shape if it is there."""
        q = super().decode(module, tensors, block=block)
        name = self._names(module)[2]
        if name in tensors:
            stored = read_tensor(tensors, name, torch.int64, torch.int32)
            check_shape(name, stored, (2,))
            if has_values(stored) and stored.tolist() != list(q.shape):
                raise CheckpointError(
                    f"{name}: {stored.tolist()}, but the codes have shape {list(q.shape)}; fetch "
                    "or convert the checkpoint again"
                )
        return q

    def _read_codes(self, tensors: _Tensors, name: str) -> tuple[Tensor, torch.Size]:
        words = read_matrix(tensors, name, torch.int32)
        N, K = words.shape[0], 8 * words.shape[1]
        self._check_columns(name, K)
        packed = words.contiguous().view(torch.uint8)
        # On the meta device, xor would make torch import its compiler: 1 s and 150 MB.
        return packed ^ _NIBBLE_SIGNS if has_values(words) else packed, torch.Size((N, K))

    def _check_columns(self, name: str, K: int) -> None:
        check_columns(name, K, self.format.block[1])

    def _specs(self, parts: Mapping[str, TensorSpec], shape: _Shape) -> tuple[TensorSpec, ...]:
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


class Int4Signed(Encoding):
    """`w4a8` as in memory, with codes as I8 and scales as FP32.

    Scales of other writers are rounded to BF16, as SGLang does when it loads them.
    """

    def __init__(self) -> None:
        codes = (torch.int8, torch.uint8)
        scales = (torch.float32, torch.bfloat16)
        super().__init__("w4a8", "weight", "weight_scale_inv", codes=codes, scales=scales)

    def _scale(self, tensors: _Tensors, name: str, *shapes: _Shape) -> Tensor:
        stored = read_tensor(tensors, name, *self._scale_dtypes)
        check_shape(name, stored, *shapes)
        return stored.to(self.format.scale_dtype)


class Int4Groups(Int4Packed):
    """`int4`: as `Int4Packed`, with groups of any size and scales of any float dtype; read-only.

    Codes may also be `weight`, I8 [N, K], one from -8 to 7 in each byte.
    """

    def __init__(self) -> None:
        super().__init__("int4", read_only=True)
        self.suffixes += ("weight",)

    def _read_codes(self, tensors: _Tensors, name: str) -> tuple[Tensor, torch.Size]:
        unpacked = f"{name.removesuffix('weight_packed')}weight"
        if name in tensors or unpacked not in tensors:
            return super()._read_codes(tensors, name)
        codes = read_matrix(tensors, unpacked, torch.int8)
        check_columns(unpacked, codes.shape[1], self.format.codes_per_byte)
        if has_values(codes) and codes.numel() and not -8 <= codes.min() <= codes.max() <= 7:
            raise CheckpointError(
                f"{unpacked}: codes from {codes.min()} to {codes.max()}, but INT4 has -8 to 7; "
                "fetch or convert the checkpoint again"
            )
        low, high = codes.view(torch.uint8)[:, ::2], codes.view(torch.uint8)[:, 1::2]
        # On the meta device, arithmetic would make torch import its compiler, as above.
        return (low & 15 | high << 4) if has_values(codes) else low, codes.shape

    def _check_columns(self, name: str, K: int) -> None:
        """Any number of columns; `_read_scale` says what divides them."""

    def _read_scale(
        self, tensors: _Tensors, names: Sequence[str], shape: _Shape, block: Block | None
    ) -> Tensor:
        N, K = shape
        values = read_matrix(tensors, names[0], *self._scale_dtypes)
        if values.shape[0] != N or values.shape[1] == 0 or K % values.shape[1]:
            raise CheckpointError(
                f"{names[0]}: shape {list(values.shape)}, but must be [{N}, a divisor of {K}], for "
                f"{N} rows and {K} columns; fetch the checkpoint again"
            )
        if block is not None:
            check_stated(names[0], values, shape, block)
        return values.float()


class Fp8Channels(Encoding):
    """`fp8_channel`: E4M3 codes, one scale per row, [N, 1] or [N], or a single one for all rows.

    Args:
        scales: names of the scale; exactly one must be present.
        read_only: as Encoding.
    """

    def __init__(self, *scales: str, read_only: bool = True) -> None:
        super().__init__("fp8_channel", "weight", *scales, scales=_FLOATS, read_only=read_only)

    def _read_scale(
        self, tensors: _Tensors, names: Sequence[str], shape: _Shape, block: Block | None
    ) -> Tensor:
        N = shape[0]
        name = _only_one(tensors, names)
        scale = self._scale(tensors, name, (N, 1), (N,), (1,), ())
        if block is not None:
            check_stated(name, scale, shape, block)
        return scale.reshape(-1, 1).expand(N, 1)


class Fp8Tensors(Encoding):
    """`fp8_tensor`: E4M3 codes and one scale, [1] or []; both are read.

    A weight without rows or columns has a scale of 1 here, and none in memory.
    """

    def __init__(self, *, shape: tuple[int, ...] = (1,)) -> None:
        super().__init__("fp8_tensor", "weight", "weight_scale", scales=_FLOATS)
        self._shape = shape

    def _read_scale(
        self, tensors: _Tensors, names: Sequence[str], shape: _Shape, block: Block | None
    ) -> Tensor:
        if block is not None:
            stored = read_tensor(tensors, names[0], *self._scale_dtypes)
            check_stated(names[0], stored, shape, block)
        scale = self._scale(tensors, names[0], (1,), ())
        return scale.reshape(1, 1)[: shape[0], : shape[1]]

    def _specs(self, parts: Mapping[str, TensorSpec], shape: _Shape) -> tuple[TensorSpec, ...]:
        return parts["qdata"], TensorSpec(dtype=torch.float32, shape=self._shape)

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        scale = q.scale if q.scale.numel() else q.scale.new_ones(1)
        return q.qdata, scale.reshape(self._shape)


class Fp8BlocksFlexible(Encoding):
    """`fp8_block` as written by Model-Optimizer and related tools; read-only.

    The scale is called `weight_scale` or `weight_scale_inv`, and is a multiplier under both names.
    Its shape is [ceil(N/128), ceil(K/128)], [.., 1, .., 1], or [] for a single block.
    """

    def __init__(self) -> None:
        names = ("weight", "weight_scale", "weight_scale_inv")
        super().__init__("fp8_block", *names, scales=_FLOATS, read_only=True)

    def _read_scale(
        self, tensors: _Tensors, names: Sequence[str], shape: _Shape, block: Block | None
    ) -> Tensor:
        rows, columns = self.format.specs(shape)["scale"].shape
        shapes = [(rows, columns), (rows, 1, columns, 1), *([()] if rows == columns == 1 else [])]
        return self._scale(tensors, _only_one(tensors, names), *shapes).reshape(rows, columns)


def _only_one(tensors: _Tensors, names: Sequence[str]) -> str:
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


FP8 = _by_format(
    Scheme(encoding=Fp8Blocks("weight_scale_inv"), names=([128, 128],)),
    # vLLM's name and transformers' name; both are multipliers.
    Scheme(encoding=Fp8Channels("weight_scale", "weight_scale_inv"), names=(None,)),
)
"""By `weight_block_size`."""

FP8_UE8M0 = _by_format(
    Scheme(encoding=Fp8BlocksE8m0("weight_scale_inv")),
    Scheme(encoding=mxfp4_signed("weight_scale_inv")),
)

COMPRESSED_TENSORS = _by_format(
    Scheme(encoding=Fp8Blocks("weight_scale"), names=("float-quantized",)),
    Scheme(
        encoding=Nvfp4Packed(),
        names=("nvfp4-pack-quantized",),
        input_scale=InputScale(suffix="input_global_scale", shape=(1,), divides=True),
    ),
    Scheme(encoding=e8m0_bytes("mxfp4", "weight_packed"), names=("mxfp4-pack-quantized",)),
    Scheme(encoding=Int4Packed(), names=("pack-quantized",)),
    Scheme(encoding=Fp8Channels("weight_scale", read_only=False), names=("float-quantized",)),
    Scheme(encoding=e8m0_bytes("mxfp8", "weight"), names=("mxfp8-quantized",)),
    Scheme(
        encoding=Fp8Tensors(),
        names=("float-quantized",),
        input_scale=InputScale(suffix="input_scale", shape=(1,), of_layer=True),
    ),
    Scheme(
        encoding=Int4Groups(),
        names=("pack-quantized", "int-quantized"),
        strategies=("channel",),
        any_group=True,
    ),
)
"""By `format`, which says what the library calls the encoding."""

W4AFP8 = _by_format(
    Scheme(
        encoding=Int4Signed(),
        input_scale=InputScale(
            suffix="input_scale",
            of_layer=True,
            leaves=(("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")),
        ),
    ),
    Scheme(encoding=Fp8Blocks("weight_scale_inv")),
)

GPT_OSS = _by_format(Scheme(encoding=Mxfp4Blocks()))

MODELOPT = _by_format(
    Scheme(encoding=Nvfp4Multiplied(), names=("W4A16_NVFP4", "NVFP4"), input_scale=_MULTIPLIER),
    Scheme(encoding=Fp8Tensors(shape=()), names=("FP8",), input_scale=_OF_FP8),
    Scheme(encoding=Fp8Channels("weight_scale"), names=("FP8_PER_CHANNEL_PER_TOKEN",)),
    Scheme(encoding=Fp8BlocksFlexible(), names=("FP8_PB_WO", "FP8_PB_REAL", "FP8_BLOCK_SCALES")),
    Scheme(encoding=e8m0_bytes("mxfp8", "weight", read_only=True), names=("MXFP8",)),
)
"""By `quant_algo`."""

DEEPSEEK_V4 = _by_format(
    Scheme(encoding=Fp8BlocksByRole("scale"), names=("fp8",)),
    Scheme(encoding=mxfp4_signed("scale"), names=("fp4",)),
)
"""By `expert_dtype`."""

# As in memory, unless another dialect's encoding has no tensor called `weight` either.
MOEQUANT = _by_format(
    *(Scheme(encoding=Encoding(name, "weight_codes", "weight_scale")) for name in CONVERTIBLE)
) | _by_format(
    Scheme(encoding=Fp8Blocks("weight_scale", codes="weight_fp8", ragged=True)),
    Scheme(encoding=Nvfp4Packed(), input_scale=_MULTIPLIER),
    Scheme(encoding=Encoding("fp8_tensor", "weight_codes", "weight_scale"), input_scale=_OF_FP8),
    Scheme(encoding=e8m0_bytes("mxfp4", "weight_packed")),
    Scheme(encoding=e8m0_bytes("mxfp8", "weight_fp8")),
    Scheme(encoding=Int4Packed()),
)
