"""Quantize, decode and compare with functions compiled for this processor."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

from moequant.errors import UnsupportedError
from moequant.formats import QuantizedWeight, dequantize, dtype_text, get_format
from moequant.formats.base import SOURCE_DTYPES, check_values
from moequant.native_code import UnavailableError, jit
from moequant.quantizers import column_kernel, decoding
from moequant.quantizers.base import Quantizer, Stored
from moequant.quantizers.elements import Source, float_bits
from moequant.quantizers.encoded import Encoded
from moequant.quantizers.kernels import (
    amax,
    padded_importance,
    quantizing_kernel,
    scratch_count,
)
from moequant.quantizers.operands import LEAST_RUN, Operand, operand_of, run_of
from moequant.quantizers.probes import check_bytes, check_decoding, check_sums

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor

    from moequant.formats import Format, StoredWeight
    from moequant.formats.elements import Element
    from moequant.quantizers.base import Allocator

    _LikelyScales = dict[Hashable, tuple[float, bool]]

_Key = tuple[str, tuple[tuple[str, str], ...], Stored]

_NOTHING = (0, 0, 0, 0.0)
"""The second operand of kernels that have only one."""
_NO_MEMORY = (0, 0)
"""Scratch and importance of kernels that use neither."""
_ROUNDS_TO_INF = {
    torch.float32: float_bits(float("inf")),
    torch.bfloat16: float_bits(torch.finfo(torch.bfloat16).max) + 0x8000,
}
"""Bits of the smallest float32 that rounds to Inf."""


class NativeQuantizer(Quantizer):
    """Runs the kernels of `kernels` and `decoding`, which `prepare` compiles.

    Codes and scales are decoded in registers. Weights whose scales change within LEAST_RUN columns,
    which only happens if K is not a multiple of it, are first decoded by the reference functions.

    Raises:
        UnavailableError: LLVM cannot be loaded, or does not support this processor.
    """

    name = "native"
    summary = "vector code compiled for this processor"

    def __init__(self) -> None:
        self._processor = jit.processor()
        self._kernels: dict[_Key, _Kernels] = {}
        self._decoders: dict[tuple[str, torch.dtype], jit.Compiled] = {}
        self._comparers: dict[tuple[Stored, Stored], jit.Compiled] = {}
        self._column_kernels: dict[str, jit.Compiled] = {}
        self._compiling = threading.Lock()
        self._likely: _LikelyScales = {}

    def prepare(self, format: Format, options: Mapping[str, str], stored: Stored) -> None:
        """As Quantizer; kernels are compared with the reference before they are used."""
        if not format.is_plain:
            self._prepare_quantizing(format, options, stored)
            if isinstance(stored, str):
                self.prepare_comparing(stored, format.name)
        elif isinstance(stored, str):
            self.prepare_decoding(stored, format.qdata_dtype)
            self.prepare_comparing(stored, format.qdata_dtype)

    def prepare_decoding(self, stored: str, dtype: torch.dtype) -> None:
        """As Quantizer; as `prepare`."""
        if (stored, dtype) in self._decoders:
            return
        kernel = jit.compile_function(decoding.decode(_source(stored, "w_"), dtype_text(dtype)))
        run = partial(_decode, kernel, dtype=dtype, empty=torch.empty)
        check_decoding(stored, dtype, run, self._processor)
        self._decoders[stored, dtype] = kernel

    def prepare_comparing(self, before: Stored, after: Stored) -> None:
        """As Quantizer; as `prepare`."""
        if (before, after) in self._comparers:
            return
        function = decoding.compare(_source(before, "w_"), _source(after))
        kernel = jit.compile_function(function)
        check_sums(before, after, partial(_compare, kernel), self._processor)
        self._comparers[before, after] = kernel

    def _prepare_quantizing(
        self, format: Format, options: Mapping[str, str], stored: Stored
    ) -> _Kernels:
        key = format.name, tuple(sorted(options.items())), stored
        if key not in self._kernels:
            self._kernels[key] = self._compile(format, options, stored)
        return self._kernels[key]

    def _compile(self, format: Format, options: Mapping[str, str], stored: Stored) -> _Kernels:
        source = _source(stored, "w_")
        made = _Kernels(
            source=source,
            amax=jit.compile_function(amax(source)),
            quantize=jit.compile_function(quantizing_kernel(format, source, options)),
        )

        def run(w: StoredWeight, importance: Tensor | None) -> QuantizedWeight:
            return _run(
                [made], format, [w], options, ["probe"], torch.empty, [importance], likely={}
            )[0]

        check_bytes(format, options, stored, run, self._processor)
        return made

    def quantize_fused(
        self,
        format: Format,
        weights: Sequence[StoredWeight],
        options: Mapping[str, str],
        *,
        names: Sequence[str],
        empty: Allocator = torch.empty,
        scratch: Allocator = torch.empty,
        mean_squares: Sequence[Tensor] | None = None,
    ) -> list[QuantizedWeight]:
        """As Quantizer."""
        importances = format.importances(weights, options, mean_squares, names=names)
        weights = [
            w if _is_read(w) else self._numbers([w], [name], scratch)[0]
            for w, name in zip(weights, names, strict=True)
        ]
        for w, name in zip(weights, names, strict=True):
            _check_kind(w, format, name)
        kernels = [self._prepare_quantizing(format, options, _stored(w)) for w in weights]
        return _run(
            kernels, format, weights, options, names, empty, importances, likely=self._likely
        )

    def round_columns(
        self,
        element: Element,
        target: Tensor,
        scale: Tensor,
        codes: Tensor,
        errors: Tensor,
        feedback: Tensor,
    ) -> None:
        """As Quantizer, at most MOST_COLUMNS of them; several threads may use it."""
        B, N = target.shape
        assert B <= column_kernel.MOST_COLUMNS, B
        feedback = feedback.contiguous()
        self._column_kernel(element.name)(
            target.data_ptr(), scale.data_ptr(), 0, 0.0, B, N,
            codes.data_ptr(), errors.data_ptr(), 0, 0.0, feedback.data_ptr(), 0,
        )  # fmt: skip

    def _column_kernel(self, element: str) -> jit.Compiled:
        with self._compiling:
            if element not in self._column_kernels:
                function = column_kernel.round_columns(element)
                self._column_kernels[element] = jit.compile_function(function)
            return self._column_kernels[element]

    def decode(
        self, q: QuantizedWeight, dtype: torch.dtype, *, name: str, empty: Allocator = torch.empty
    ) -> Tensor:
        """As Quantizer."""
        if not _is_read(q):
            return super().decode(q, dtype, name=name, empty=empty)
        self.prepare_decoding(q.format, dtype)
        numbers, is_finite = _decode(self._decoders[q.format, dtype], q, dtype, empty)
        if not is_finite:
            # Decode by the reference, which raises the error with index and value.
            return super().decode(q, dtype, name=name, empty=empty)
        return numbers

    def compare(self, before: StoredWeight, after: StoredWeight) -> tuple[float, float]:
        """As Quantizer."""
        pair = _stored(before), _stored(after)
        # Two plain weights are never compared in practice, and their K may not fill vectors.
        if not (_is_read(before) and _is_read(after) and any(isinstance(s, str) for s in pair)):
            return super().compare(before, after)
        self.prepare_comparing(*pair)
        return _compare(self._comparers[pair], before, after)


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Kernels for one format, its options and one way of storing weights."""

    source: Source
    amax: jit.Compiled
    quantize: jit.Compiled


class _Task:
    """One weight of a fused set.

    Args:
        kernels: the kernels for its storage.
        w: the weight.
        format: the format to quantize to.
        name: name of the weight for error messages.
        empty: allocator of the result.
        importance: [K] float32 for a weighted search.
    """

    def __init__(
        self,
        kernels: _Kernels,
        w: StoredWeight,
        format: Format,
        name: str,
        empty: Allocator,
        importance: Tensor | None,
    ) -> None:
        self.name = name
        self._kernels, self._w, self._format = kernels, w, format
        self._operand = operand_of(w)
        self._importance = None if importance is None else padded_importance(format, importance)
        specs = format.specs(w.shape, name)
        self._qdata, self._scale = (
            empty(specs[k].shape, dtype=specs[k].dtype) for k in ("qdata", "scale")
        )

    def find_largest(self) -> float:
        """The largest magnitude."""
        read = self._operand.arguments()
        bits = self._kernels.amax(*read, *self._w.shape, *_NOTHING, *_NO_MEMORY)
        return self._magnitude(bits)

    def fill(self, global_scale: float) -> float:
        """Write codes and scales for a shared scale (0 for none); returns the largest magnitude."""
        count = scratch_count(self._format, self._scale.shape[-1])
        scratch = torch.empty(count, dtype=torch.float32) if count else None
        result = Operand(self._qdata, self._scale, global_scale=global_scale)
        address = 0 if scratch is None else scratch.data_ptr()
        bits = self._kernels.quantize(
            *self._operand.arguments(),
            *self._w.shape,
            *result.arguments(),
            address,
            0 if self._importance is None else self._importance.data_ptr(),
        )
        return self._magnitude(bits)

    def result(self, global_scale: Tensor | None) -> QuantizedWeight:
        """The weight that `fill` wrote last, with the scale that the set shares, if it does."""
        own = self._format.shares_scale or global_scale is None
        return QuantizedWeight(
            format=self._format.name,
            qdata=self._qdata,
            scale=self._scale,
            global_scale=None if own else global_scale,
            shape=self._w.shape,
        )

    def _magnitude(self, bits: int) -> float:
        w, name = self._w, self.name
        if bits >= self._kernels.source.infinity:
            check_values(dequantize(w) if isinstance(w, QuantizedWeight) else w, name)
            raise UnavailableError(f"{name}: magnitude {bits:#x}, but every weight is finite")
        return self._kernels.source.number(bits)


def _run(
    kernels: Sequence[_Kernels],
    format: Format,
    weights: Sequence[StoredWeight],
    options: Mapping[str, str],
    names: Sequence[str],
    empty: Allocator,
    importances: Sequence[Tensor | None],
    *,
    likely: _LikelyScales,
) -> list[QuantizedWeight]:
    """Quantize a fused set, each weight with the kernels for its storage.

    Finding the largest weight takes a third of the time, and powers of two rarely change from
    expert to expert. So if the last two sets of these shapes shared the same scale, this one is
    quantized with it, and again if its own largest weight needs another one.
    """
    tasks = [
        _Task(own, w, format, name, empty, importance)
        for own, w, name, importance in zip(kernels, weights, names, importances, strict=True)
    ]
    if not (format.has_global_scale or format.shares_scale):
        for task in tasks:
            task.fill(0.0)
        return [task.result(None) for task in tasks]
    scale_of = partial(_global_scale, format, tuple(options.items()))
    kind = format.name, *(w.shape for w in weights)
    last, repeated = likely.get(kind, (0.0, False))
    tried = last if repeated else scale_of(max(task.find_largest() for task in tasks))
    needed = scale_of(max(task.fill(tried) for task in tasks))
    if needed != tried:
        for task in tasks:
            task.fill(needed)
    likely[kind] = needed, needed == last
    # The device is named because `torch.set_default_device` may have set another.
    global_scale = torch.tensor(needed, dtype=torch.float32, device="cpu")
    return [task.result(global_scale) for task in tasks]


@lru_cache(maxsize=1 << 12)
def _global_scale(format: Format, options: tuple[tuple[str, str], ...], largest: float) -> float:
    """The scale that weights with this largest magnitude share.

    Cached, because a dozen torch operations on one number take a tenth of the quantizer's time, and
    the largest weights of a model's experts have few distinct values.
    """
    w = torch.tensor([[largest]], dtype=torch.float32, device="cpu")
    return format.global_scale([w], dict(options)).item()


def _decode(
    kernel: jit.Compiled, q: QuantizedWeight, dtype: torch.dtype, empty: Allocator
) -> tuple[Tensor, bool]:
    """The decoded numbers of `q`, and whether all are finite."""
    numbers, operand = empty(q.shape, dtype=dtype), operand_of(q)
    bits = kernel(*operand.arguments(), *q.shape, numbers.data_ptr(), *_NOTHING[1:], *_NO_MEMORY)
    return numbers, bits < _ROUNDS_TO_INF[dtype]


def _compare(
    kernel: jit.Compiled, before: StoredWeight, after: StoredWeight
) -> tuple[float, float]:
    assert before.shape == after.shape, (before.shape, after.shape)
    one, other = operand_of(before), operand_of(after)
    sums = torch.empty(2, dtype=torch.float64)
    kernel(*one.arguments(), *before.shape, *other.arguments(), sums.data_ptr(), 0)
    signal, noise = sums.tolist()
    return signal, noise


def _source(stored: Stored, operand: str = "") -> Source:
    """How kernels read weights stored in this way."""
    if not isinstance(stored, str):
        return Source(dtype_text(stored))
    return Encoded(stored, operand)


def _stored(w: StoredWeight) -> Stored:
    if not isinstance(w, QuantizedWeight):
        return w.dtype
    return w.qdata.dtype if get_format(w.format).is_plain else w.format


def _is_read(w: StoredWeight) -> bool:
    """Whether kernels can read the weight without decoding it first."""
    if not isinstance(w, QuantizedWeight) or get_format(w.format).is_plain:
        return True
    return run_of(w) >= LEAST_RUN


def _check_kind(w: StoredWeight, format: Format, name: str) -> None:
    data = w.qdata if isinstance(w, QuantizedWeight) else w
    if len(w.shape) != 2 or not data.is_cpu:
        raise UnsupportedError(
            f"{name}: {list(w.shape)} on {data.device}, but must be a weight [N, K] on the CPU"
        )
    format.check_shape(w.shape, name)
    if not isinstance(w, QuantizedWeight) and w.dtype not in SOURCE_DTYPES:
        check_values(w, name)
