"""Encoding: how a quantized weight is stored as tensors. `schemes.py` has those of each dialect."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moequant.dialects.tensors import (
    cast_exactly,
    check_columns,
    check_shape,
    read_matrix,
    read_tensor,
)
from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight, TensorSpec, get_format, plain_weight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moequant.dialects.tensors import Block

    _Tensors = Mapping[str, Tensor]
    _Shape = Sequence[int]


class Encoding:
    """Names, dtypes and shapes of the tensors of a weight of one format in a dialect.

    As in memory, unless a subclass or an argument says otherwise. `decode` is the inverse of
    `encode`, and also accepts variants of other writers.

    Args:
        format: name of the format of the weights.
        suffixes: names after `module.` in the order of writing: codes, scale, and others.
        codes: dtypes of codes that are read, the first of which is written; by default the one in
            memory.
        scales: dtypes of scales that are read, the first of which is written; by default the one
            in memory.
        read_only: whether the encoding is only read; `check`, `specs` and `encode` may not be
            called then.
    """

    def __init__(
        self,
        format: str,
        *suffixes: str,
        codes: tuple[torch.dtype, ...] = (),
        scales: tuple[torch.dtype, ...] = (),
        read_only: bool = False,
    ) -> None:
        self.format = get_format(format)
        self.suffixes = suffixes
        self.read_only = read_only
        self._code_dtypes = codes or (self.format.qdata_dtype,)
        self._scale_dtypes = scales or (self.format.scale_dtype,)

    @property
    def beside_codes(self) -> tuple[str, ...]:
        """The suffixes of its small tensors: scales, and the logical shape."""
        return tuple(s for s in self.suffixes[1:] if s != "weight")

    @property
    def scales(self) -> tuple[str, ...]:
        """The suffixes of its scales."""
        return tuple(s for s in self.beside_codes if s != "weight_shape")

    def decode(
        self, module: str, tensors: _Tensors, *, block: Block | None = None
    ) -> QuantizedWeight:
        """The weight of `module` in `tensors`, which may contain other modules' tensors.

        On the meta device, tensors have no values and only dtypes and shapes are checked.

        Args:
            module: the weight's module.
            tensors: by full name.
            block: rows and columns that share a scale, where config.json states them; encodings
                that read several shapes of scales then read no other. None: any of these.

        Raises:
            CheckpointError: a tensor is missing or has the wrong dtype or shape.
            UnsupportedError: a scale has values that the format's scale dtype cannot represent.
        """
        codes, *others = self._names(module)
        qdata, shape = self._read_codes(tensors, codes)
        return QuantizedWeight(
            format=self.format.name,
            qdata=qdata,
            scale=self._read_scale(tensors, others, shape, block),
            global_scale=self._read_global_scale(tensors, others),
            shape=shape,
        )

    def as_read(self, q: QuantizedWeight) -> QuantizedWeight:
        """The weight that `decode` returns for what `encode` writes for `q`."""
        return q

    def stored_ratio(self, q: QuantizedWeight) -> float:
        """The exact numbers on disk divided by those that `decode` returns; 1 if exact."""
        return 1.0

    def check(self, module: str, shape: _Shape, *, rows_follow: bool = False) -> None:
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

    def specs(self, module: str, shape: _Shape) -> dict[str, TensorSpec]:
        """Dtype and shape of each tensor that `encode` returns for a weight [N, K], by name."""
        parts = self.format.specs(shape, module)
        if self._code_dtypes[0] != self.format.qdata_dtype:
            parts = {**parts, "qdata": replace(parts["qdata"], dtype=self._code_dtypes[0])}
        if self._scale_dtypes[0] != self.format.scale_dtype:
            parts = {**parts, "scale": replace(parts["scale"], dtype=self._scale_dtypes[0])}
        return dict(zip(self._names(module), self._specs(parts, shape), strict=True))

    def encode(
        self, module: str, q: QuantizedWeight, *, consume: bool = False
    ) -> dict[str, Tensor]:
        """The tensors of one weight [N, K], by full name; `consume` as `Dialect.to_disk`."""
        return dict(zip(self._names(module), self._encode(q, consume=consume), strict=True))

    def _names(self, module: str) -> list[str]:
        return [f"{module}.{suffix}" for suffix in self.suffixes]

    def _specs(self, parts: Mapping[str, TensorSpec], shape: _Shape) -> tuple[TensorSpec, ...]:
        """Specs in the order of `suffixes`, from those of QuantizedWeight's fields."""
        return tuple(parts.values())

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        """Tensors in the order of `suffixes`; codes are changed in place only if `consume`."""
        parts = q.tensors()
        parts["qdata"] = q.qdata.view(self._code_dtypes[0])
        stored = self._scale_dtypes[0]
        parts["scale"] = q.scale.view(stored) if stored == torch.uint8 else q.scale.to(stored)
        return tuple(parts.values())

    def _read_codes(self, tensors: _Tensors, name: str) -> tuple[Tensor, torch.Size]:
        """The codes as in memory, and the shape [N, K] of their weight."""
        qdata = read_matrix(tensors, name, *self._code_dtypes).view(self.format.qdata_dtype)
        N, K = qdata.shape[0], self.format.codes_per_byte * qdata.shape[1]
        if not self.format.ragged:
            check_columns(name, K, self.format.block[1])
        return qdata, torch.Size((N, K))

    def _read_scale(
        self, tensors: _Tensors, names: Sequence[str], shape: _Shape, block: Block | None
    ) -> Tensor:
        """The scale as in memory; `names` are those of all tensors but the codes."""
        return self._scale(tensors, names[0], self.format.specs(shape)["scale"].shape)

    def _scale(self, tensors: _Tensors, name: str, *shapes: _Shape) -> Tensor:
        """The scale called `name`, which must have one of `shapes`, in the dtype of memory."""
        stored = read_tensor(tensors, name, *self._scale_dtypes)
        check_shape(name, stored, *shapes)
        if stored.dtype == torch.uint8:
            return stored.view(self.format.scale_dtype)
        return cast_exactly(name, stored, self.format.scale_dtype)

    def _read_global_scale(self, tensors: _Tensors, names: Sequence[str]) -> Tensor | None:
        """The global scale as in memory, if the format has one."""
        if not self.format.has_global_scale:
            return None
        stored = read_tensor(tensors, names[1], torch.float32)
        check_shape(names[1], stored, (), (1,))
        return stored.reshape(())


class Plain(Encoding):
    """`bf16`: the weight itself, as in an unquantized model."""

    def __init__(self) -> None:
        super().__init__("bf16", "weight")

    def decode(
        self, module: str, tensors: _Tensors, *, block: Block | None = None
    ) -> QuantizedWeight:
        """As Encoding."""
        (weight,) = self._names(module)
        return plain_weight(read_matrix(tensors, weight, torch.bfloat16))

    def _specs(self, parts: Mapping[str, TensorSpec], shape: _Shape) -> tuple[TensorSpec, ...]:
        return (parts["qdata"],)

    def _encode(self, q: QuantizedWeight, *, consume: bool) -> tuple[Tensor, ...]:
        return (q.qdata,)
